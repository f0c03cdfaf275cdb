"""A forward or backward that runs again finds what the first run found."""

from __future__ import annotations

import torch

from fxpasses.graph import ALARM, StateSpec
from fxpasses.guards.alarms import Alarms
from fxpasses.guards.replay import guarded

ALARMS = StateSpec(ALARM, "", (2,), torch.int64, torch.device("cpu"))


class Accelerator:
    """Random numbers of a device that counts."""

    def __init__(self):
        self.state = 5

    def draw(self):
        self.state += 1
        return self.state

    def get_rng_state(self, device):
        assert device == torch.device("cuda", 1)
        return self.state

    def set_rng_state(self, state, device):
        assert device == torch.device("cuda", 1)
        self.state = state


def test_random_numbers_are_drawn_again_on_each_device(monkeypatch):
    module, drawn, alarms = Accelerator(), [], Alarms("products,on=recompute", None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def run():
        drawn.append((float(torch.rand(())), module.draw()))
        alarms.tensor(ALARMS).add_(len(drawn) == 1)
        return len(drawn)

    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    assert guarded(alarms, run, (), devices) == 2
    assert drawn[0] == drawn[1] and module.state == 6


def test_a_run_without_an_alarm_leaves_them_where_they_are():
    alarms, before = Alarms("products,on=recompute", None), torch.get_rng_state()
    guarded(alarms, lambda: torch.rand(()), ())
    assert not torch.equal(before, torch.get_rng_state())
