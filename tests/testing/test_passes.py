"""Our passes on graphs that nobody wrote by hand. `make fuzz` shows each of them 10,000."""

import gc
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fxpasses.testing.check import EXAMPLES_VARIABLE, count_of_examples
from tests.testing import promises, properties
from tests.testing.scheduling import schedules

# Further forms of one pass differ from the first in little: where waits stand, which codec. They, and what
# several passes promise together, get 30 examples where a pass gets 200.
FEW = -(-count_of_examples() * 30 // 200)


def _all(by_module: Mapping[str, tuple[Any, ...]], *others: tuple[Any, ...]) -> list[Any]:
    """Each property once."""
    return list(dict.fromkeys(itertools.chain(*by_module.values(), *others)))


SEVERAL = _all(promises.DRAWN, promises.ANYWHERE, promises.TOGETHER)


@pytest.fixture(autouse=True)
def collects_what_is_new() -> Iterator[None]:
    """Graphs are full of cycles; what is there before a test, programs above all, is not searched for them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def modules_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trace of `make_fx` exchanges two methods of `nn.Module` for ones that do the same, and
    exchanges them back: a fifth of the time of a splice.
    """
    patcher = "torch.fx._symbolic_trace._Patcher.patch_method"
    monkeypatch.setattr(patcher, lambda *args, **kwargs: None)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(properties.OWN))
def test_pass(name, monkeypatch):
    is_further = name.startswith(("gradient_sync_", "compress_")) and name != "compress_int4"
    makes_large_graphs = name.startswith(("inject", "check", "replay"))
    if is_further:
        monkeypatch.setenv(EXAMPLES_VARIABLE, str(FEW))
    properties.holds(name, 30 if makes_large_graphs else None)


@pytest.mark.timeout(0)
def test_schedule():
    schedules(count_of_examples(30))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("search", [search for search in SEVERAL if search is not schedules])
def test_several(search):
    search(FEW)


@pytest.mark.parametrize("check", _all(promises.SINGLE, promises.ANYWHERE_SINGLE))
def test_single(check):
    check()
