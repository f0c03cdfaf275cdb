"""Who looks on while passes run. What `CheckRules` finds stands in test_spec."""

from __future__ import annotations

import pytest

from fxpasses.observers import CheckRules, GraphName, watchers_of, watching
from fxpasses.passes.bucketing import Bucketing
from fxpasses.passes.gradient_sync import GradientSync
from fxpasses.pipeline import Pipeline
from fxpasses.spec import SpecError
from tests.graphs import WORLD, doubled


def test_rules_of_one_run_say_nothing_of_another(fake_world):
    sync = GradientSync(group=fake_world, world=WORLD, reduce="mean")
    for shape in ((3,), (4, 2)):
        Pipeline((Bucketing(mb=1), sync)).run("backward", doubled(shape), [CheckRules()])
    with pytest.raises(SpecError, match="signature"):
        rules = CheckRules()
        for shape in ((3,), (4, 2)):
            Pipeline((Bucketing(mb=1),)).run("backward", doubled(shape), [rules])


def test_watchers_see_regions_from_zero():
    seen: list[str] = []

    def watcher(name):
        return [lambda *event: seen.append(str(name))]

    for _ in range(2):
        with watching(watcher):
            for region in (7, 9, 7):
                for look in watchers_of(GraphName(1, region, "joint")):
                    look(None, None, doubled((3,)))
    assert seen == ["rank1/g0.joint", "rank1/g1.joint", "rank1/g0.joint"] * 2
    assert watchers_of(GraphName(0, 0, "joint")) == []
