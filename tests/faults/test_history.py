"""What is remembered of a long run."""

from fxpasses.distributed.group import Group
from fxpasses.faults import history
from fxpasses.faults.history import forget
from fxpasses.guards.alarms import Alarm, Alarms


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(history, "REMEMBERED", 3)
    events = [1, 2, 3, 4, 5]
    assert forget(events) == 2 and events == [3, 4, 5]
    assert forget(events) == 0 and events == [3, 4, 5]


def test_alarms_count_what_they_forget(monkeypatch):
    monkeypatch.setattr(history, "REMEMBERED", 3)
    alarms = Alarms("products", Group(None, 1, 0))
    for step in range(5):
        alarms.note(Alarm(step, 1, "here"))
    assert [alarm.step for alarm in alarms.events] == [2, 3, 4] and alarms.forgotten == 2
