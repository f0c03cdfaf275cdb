"""Case 25 and its kind: graphs that Dynamo splits."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxpasses
from tests.multirank import run_ranks

BACKENDS = ["hardened", "hardened_aot_eager"]


class DropPath(nn.Module):
    """Stochastic depth: the branch is dropped with probability `p`, which differs by block."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = torch.rand(x.shape[0], 1) >= self.p
        torch._dynamo.graph_break()
        return x * keep / (1 - self.p)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.drops = nn.ModuleList(DropPath(p) for p in (0.0, 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drops[0](torch.relu(self.layers[0](x)))
        torch._dynamo.graph_break()
        return x + self.drops[1](torch.relu(self.layers[1](x)))


def gradients(backend: str | None, rank: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Blocks()
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(rank + 1))
    run = torch.compile(model, backend=backend, options={"bucket_mb": 1}) if backend else model
    with torch._inductor.config.patch(fallback_random=True):  # the random numbers of eager mode
        for _ in range(2):
            torch.manual_seed(7)
            run(x).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_25_stochastic_depth_across_a_graph_break(backend):
    pairs = zip(gradients(backend), gradients(None), strict=True)
    assert all(torch.allclose(ours, eager, rtol=1e-5, atol=1e-5) for ours, eager in pairs)


def gradients_of_rank(rank: int, backend: str) -> list[torch.Tensor]:
    return gradients(backend, rank)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_breaks_on_two_ranks(backend):
    found = run_ranks(gradients_of_rank, 2, backend)
    local = [gradients(None, rank) for rank in range(2)]
    for index, (first, second) in enumerate(zip(*found, strict=True)):
        assert torch.equal(first, second)
        mean = (local[0][index] + local[1][index]) / 2
        assert torch.allclose(first, mean, rtol=1e-5, atol=1e-5)


class TiedAcrossBreak(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x).sum()


def tied_across_a_break(rank: int, compiled: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    model = TiedAcrossBreak()
    run = torch.compile(model, backend="hardened_aot_eager") if compiled else model
    run(torch.full((1, 4), rank + 1.0)).backward()
    return model.a.weight.grad, fxpasses.runtime(model).last_step.collectives


def test_tied_weights_across_a_break_are_averaged():
    ours = run_ranks(tied_across_a_break, 2, True)
    local = run_ranks(tied_across_a_break, 2, False)
    mean = (local[0][0] + local[1][0]) / 2
    for gradient, collectives in ours:
        assert torch.allclose(gradient, mean)
        assert collectives == 2  # a contribution of each graph, each reduced once


def forward_twice_then_backward(rank: int) -> float:
    model = nn.Linear(1, 1, bias=False)
    compiled = torch.compile(model, backend="hardened_aot_eager")
    nn.init.ones_(model.weight)
    losses = [compiled(torch.full((1, 1), rank + x)).sum() for x in (1.0, 3.0)]
    with torch.no_grad():
        compiled(torch.ones(1, 1))
    for loss in losses:
        loss.backward()
    return model.weight.grad.item()


def test_two_forwards_before_the_backwards():
    assert run_ranks(forward_twice_then_backward, 2) == [5.0] * 2


def dynamic_batches(rank: int) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    compiled = torch.compile(model, backend="hardened_aot_eager")
    found = []
    for batch in (4, 3 + rank, 2 + 3 * rank):
        model.zero_grad()
        compiled(torch.full((batch, 1), rank + 1.0)).mean().backward()
        found.append(model.weight.grad.item())
    return found


def test_batches_of_different_sizes():
    assert run_ranks(dynamic_batches, 2) == [[1.5] * 3] * 2


def checkpointed(rank: int) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False).sum()

    compiled = torch.compile(program, backend="hardened_aot_eager", fullgraph=True)
    compiled(torch.full((2, 8), rank + 1.0)).backward()
    return layers[0].weight.grad, fxpasses.runtime(layers).last_step.collectives


def test_activation_checkpointing_reduces_once():
    (first, count), (second, _) = run_ranks(checkpointed, 2)
    assert torch.equal(first, second)
    assert count == 1


def checkpointed_dropout(rank: int, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 32))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False).sum()

    compiled = torch.compile(program, backend=backend)
    compiled(torch.ones(4, 32)).backward()
    return [p.grad for p in layers.parameters()]


def test_what_is_recomputed_drops_the_same_elements():
    """Both ranks have the same batch and draw the same numbers, so the mean is what each would have alone."""
    (expected,) = run_ranks(checkpointed_dropout, 1, "aot_eager")
    for found in run_ranks(checkpointed_dropout, 2, "hardened_aot_eager"):
        torch.testing.assert_close(found, expected)


def wrapped_in_ddp(rank: int, outside: bool) -> str:
    backend, wrap = "hardened_aot_eager", nn.parallel.DistributedDataParallel
    model = TiedAcrossBreak()
    if outside:
        model = torch.compile(wrap(model), backend=backend)
    else:
        model = wrap(torch.compile(model, backend=backend))
    try:
        model(torch.ones(1, 4))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("outside", [True, False])
def test_a_ddp_wrapper_is_refused(outside):
    messages = run_ranks(wrapped_in_ddp, 2, outside)
    assert all("DistributedDataParallel" in message for message in messages)


class PartlyEager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = nn.Linear(4, 4)
        self.eager = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_eagerly(self.compiled(x)).sum()

    @torch.compiler.disable
    def run_eagerly(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(x)


def step_of_a_partly_eager_model(rank: int) -> str:
    model = PartlyEager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.compile(model, backend="hardened_aot_eager")(torch.ones(1, 4)).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_made_eagerly_stops_the_optimizer():
    for message in run_ranks(step_of_a_partly_eager_model, 2):
        assert "parameter 2 of group 0 (torch.float32[4, 4]) was not reduced" in message


def steps_of_an_optimizer_of_its_own(rank: int, reduces_itself: bool) -> str:
    model = PartlyEager()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.compiled, model.eager)]
    compiled = torch.compile(model, backend="hardened_aot_eager")
    try:
        for _ in range(3):
            compiled(torch.full((1, 4), rank + 1.0)).backward()
            if reduces_itself:
                for parameter in model.eager.parameters():
                    dist.all_reduce(parameter.grad)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_optimizer_of_nothing_but_eager_gradients_is_stopped_too():
    for message in run_ranks(steps_of_an_optimizer_of_its_own, 2, False):
        assert "parameter 0 of group 0 (torch.float32[4, 4]) was not reduced" in message


def test_unless_the_program_reduces_them_itself():
    assert run_ranks(steps_of_an_optimizer_of_its_own, 2, True) == ["", ""]


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def step_at_which_it_is_noticed(rank: int, outside_from: int) -> int:
    """A parameter that the loss uses too, from some step on."""
    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="hardened_aot_eager")
    for step in range(1, 20):
        y = compiled(torch.full((1, 2), rank + 1.0))
        loss = y.sum() + (rank * model.weight.sum() if step >= outside_from else 0)
        optimizer.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            assert "differs over the ranks" in str(error)
            return step
    return 0


@pytest.mark.parametrize(("outside_from", "noticed"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)])
def test_a_parameter_that_comes_to_be_used_outside_is_noticed(outside_from, noticed):
    assert run_ranks(step_at_which_it_is_noticed, 2, outside_from) == [noticed] * 2


def test_an_optimizer_step_may_be_compiled():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend="eager")
    before = model.weight.detach().clone()
    torch.compile(model, backend="hardened_aot_eager")(torch.ones(1, 4)).sum().backward()
    step()
    assert not torch.equal(model.weight, before)


def step_of_an_eager_model(rank: int, other_first: bool) -> list[str]:
    import warnings

    if other_first:
        torch.compile(nn.Linear(2, 2), backend="hardened_aot_eager")(
            torch.ones(1, 2)
        ).sum().backward()
    model = nn.LSTM(2, 2)  # Dynamo does not capture it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.compile(model, backend="hardened_aot_eager")(torch.ones(1, 1, 2))[0].sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("other_first", [False, True])
def test_a_model_of_which_nothing_was_compiled_gets_a_warning(other_first):
    for messages in run_ranks(step_of_an_eager_model, 2, other_first):
        assert any("no compiled region has reduced a gradient" in message for message in messages)


class HeadInTheLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(3, 2), nn.Linear(2, 2)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(token))


def tied_head_in_the_loss(rank: int, compiled_loss: bool) -> str:
    model = HeadInTheLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ model.embedding.weight.T).logsumexp(-1).sum() * (rank + 1)

    loss_of = torch.compile(loss_of, backend="hardened_aot_eager") if compiled_loss else loss_of
    compiled = torch.compile(model, backend="hardened_aot_eager")
    try:
        for _ in range(2):
            loss_of(compiled(torch.tensor([rank]))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_parameter_used_outside_as_well_stops_the_optimizer():
    for message in run_ranks(tied_head_in_the_loss, 2, False):
        assert "parameter 0 of group 0 (torch.float32[3, 2]) differs over the ranks" in message
    assert run_ranks(tied_head_in_the_loss, 2, True) == ["", ""]
