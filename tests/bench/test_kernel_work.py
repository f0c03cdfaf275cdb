"""The comparison with fp64 that precedes each measurement of a kernel."""

import pytest
import torch

from bench.kernel_work import works
from custom_ops.layout import CHUNK

NUMEL = 2 * CHUNK
WORKS = works(NUMEL, torch.device("cpu"))


def parts(results) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("name", WORKS)
def test_results_pass_and_a_changed_one_does_not(name):
    work = WORKS[name]()
    results = work.run()
    work.check(results)
    broken = [part.clone() for part in parts(results)]
    changed = broken[0].view(-1)
    changed[len(changed) // 2 :] = (
        ~changed[len(changed) // 2 :] if changed.dtype == torch.uint8 else 1e3
    )
    with pytest.raises(AssertionError):
        work.check(tuple(broken) if isinstance(results, tuple) else broken[0])


@pytest.mark.parametrize("name", [name for name in WORKS if WORKS[name]().inductor is not None])
def test_inductor_gets_the_same_formula(name):
    work = WORKS[name]()
    assert work.inductor is not None
    theirs, ours = parts(work.inductor(*work.reads)), parts(work.run())
    if ours[0].dtype == torch.uint8:  # scales and codes in one payload
        assert abs(sum(part.nbytes for part in theirs) - sum(part.nbytes for part in ours)) <= 64
    else:
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-30)
