"""The table of what became of mutants."""

import bench.mutant_report as r
from bench.mutations import PATHS

ONE = r.Outcome(
    "tasks", "2026-01-01", "2.13.0", 60, 4, 40, {"a": "not known"}, {"b": "same"}, {"names": 3}
)
OTHER = r.Outcome("order", "2026-01-02", "2.13.0", 60, 1, 60, {}, {}, {"names": 2})


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_survivors_count_and_are_named():
    text = r.report([ONE, OTHER])
    found = rows(text)
    assert found["tasks"][1:6] == ["40", "39", "1", "97.5", "%"]
    assert found["order"][1:6] == ["60", "60", "0", "100.0", "%"]
    assert found["all"][1:6] == ["100", "99", "1", "99.0", "%"]
    assert "  a\n      not known" in text and "  b\n      same" in text
    assert "     5  names" in text


def test_what_is_kept_comes_back_but_for_modules_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(r, "TABLE", tmp_path / "m.txt")
    monkeypatch.setattr(r, "RECORDS", tmp_path / "m.json")
    assert r.kept() == {}
    gone = r.Outcome("no such module", "", "", 1, 1, 1, {}, {}, {})
    r.keep([ONE, gone])
    assert r.kept() == {"tasks": ONE} and "tasks" in PATHS
    assert r.TABLE.read_text().startswith("module")
