"""Case 37: past the recompile limit nothing runs with unreduced gradients."""

import pytest
import torch
from torch import nn

from tests.multirank import run_ranks


def many_batch_sizes(rank: int) -> tuple[int, str]:
    model = nn.Linear(1, 1, bias=False)
    compiled = torch.compile(model, backend="hardened_aot_eager", dynamic=False)
    for batch in range(1, 13):
        model.zero_grad()
        try:
            compiled(torch.full((batch, 1), rank + 1.0)).mean().backward()
        except Exception as error:
            return batch, f"{type(error).__name__}: {error}"
        assert model.weight.grad.item() == 1.5
    return 13, ""


def test_case_37_the_limit_is_an_error():
    for batch, message in run_ranks(many_batch_sizes, 2):
        assert batch == 9
        assert "recompile" in message.lower()


def late_hook() -> list[str]:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = torch.compile(model, backend="hardened_aot_eager")
    compiled(torch.ones(1, 1))
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    compiled(torch.ones(1, 1))
    return seen


def test_a_module_hook_registered_after_the_first_call_applies():
    assert late_hook() == ["hook"]


@pytest.mark.parametrize("setting", ["fail_on_recompile_limit_hit"])
def test_settings_are_made_when_the_backend_is_loaded(setting):
    import fxpasses.backend  # noqa: F401

    assert getattr(torch._dynamo.config, setting) is True
