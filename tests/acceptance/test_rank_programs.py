"""Random training programs: two or three ranks under the backend against eager code that averages by hand.

    FXPASSES_RANK_PROGRAMS=500 pytest tests/acceptance/test_rank_programs.py

A program is a small model and the actions that every rank performs on it. Each rank runs it twice, compiled and
eagerly, and compares gradients, parameters, running statistics and outputs after each action. The program of a
failure can be pasted as it is printed: `@example(Program(...))` above the test.

Without the variable a few programs run, the same ones each time; with it as many as it says, others each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxpasses
import tests.multirank  # noqa: F401  (has the server that ranks are forked from load torch first)

BACKEND = "hardened_aot_eager"
LONG_RUN = "FXPASSES_RANK_PROGRAMS"
EXAMPLES = int(os.environ.get(LONG_RUN, 20))
TIME_LIMIT_S = 60.0  # of one program
GLOO_TIMEOUT_S = 30.0  # below it, so that a rank that waits in vain says where
GRACE_S = 3.0  # for the other ranks once one has failed: they may wait for it in a collective
SHRINKING_S = 600  # hypothesis stops by itself after five minutes

FEATURES = 3
WORLDS = (2, 3)
ALL = (0, 1, 2)
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "layer": nn.LayerNorm,
    "batch": nn.BatchNorm1d,
}
PATTERNS = ("fb", "fbfb", "ffb", "ffoo", "fdfb")
PATTERNS_WITHOUT_SYNC = ("fnfb", "fnfnfb")


class Plain:
    """A repr that leaves out what has its default value, so that failures are short to read and to paste."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = [
            (f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Part(Plain):
    """`x + outer(tanh(norm(inner(x))))`.

    Attributes:
        width: outputs of `inner`.
        norm: a key of `NORMS`.
        tied: `inner` has the weight, and so the width, of the part before.
        frozen: its parameters, tied ones included, need no gradient at first.
        auxiliary: its result is an output of the model, not the input of the next part.
        used_on: ranks whose forward runs it.
        break_before: Dynamo's graph ends in front of it.
    """

    width: int = 2
    norm: str = "none"
    tied: bool = False
    frozen: bool = False
    auxiliary: bool = False
    used_on: tuple[int, ...] = ALL
    break_before: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Step(Plain):
    """Forwards and backwards, then the optimizer's step.

    Attributes:
        pattern: `f` a forward; `b` a backward of all losses that have had none, summed; `o` of the oldest;
            `d` drops the oldest; `n` is `b` in `no_sync()`.
        batch: rows of a batch.
        uneven: each rank has as many rows more as its number says.
        auxiliary_on: ranks whose loss has the auxiliary outputs in it.
    """

    pattern: str = "fb"
    batch: int = 4
    uneven: bool = False
    auxiliary_on: tuple[int, ...] = ALL

    def perform(self, trainer: Trainer) -> None:
        for letter in self.pattern * trainer.program.accumulate:
            getattr(self, f"_{letter}")(trainer)
        trainer.losses.clear()
        trainer.optimizer.step()

    def _f(self, trainer: Trainer) -> None:
        rows = self.batch + (trainer.rank if self.uneven else 0)
        result, extras = trainer.forward(rows)
        chosen = extras if trainer.rank in self.auxiliary_on else ()
        trainer.losses.append(sum(y.square().mean() for y in (result, *chosen)))

    def _b(self, trainer: Trainer, sync: bool = True) -> None:
        trainer.backward(sum(trainer.losses), sync)
        trainer.losses.clear()

    def _n(self, trainer: Trainer) -> None:
        self._b(trainer, sync=False)

    def _o(self, trainer: Trainer) -> None:
        trainer.backward(trainer.losses.pop(0))

    def _d(self, trainer: Trainer) -> None:
        del trainer.losses[0]


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluate(Plain):
    """A forward in `eval()` under `no_grad()`."""

    batch: int = 4

    def perform(self, trainer: Trainer) -> None:
        trainer.model.eval()
        with torch.no_grad():
            trainer.output, _ = trainer.forward(self.batch)
        trainer.model.train()


@dataclasses.dataclass(frozen=True, repr=False)
class Freeze(Plain):
    """Set whether a part (counted around) needs gradients."""

    part: int = 0
    frozen: bool = True

    def perform(self, trainer: Trainer) -> None:
        blocks = trainer.model.blocks
        blocks[self.part % len(blocks)].requires_grad_(not self.frozen)


@dataclasses.dataclass(frozen=True, repr=False)
class ZeroGrad(Plain):
    set_to_none: bool = True

    def perform(self, trainer: Trainer) -> None:
        trainer.optimizer.zero_grad(self.set_to_none)


Action = Step | Evaluate | Freeze | ZeroGrad


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Plain):
    """What all ranks do.

    Attributes:
        world: number of ranks.
        bucket_mb: option of the backend; the small one makes a bucket of each gradient.
        accumulate: option of the backend; each step runs its pattern as many times.
    """

    parts: tuple[Part, ...]
    actions: tuple[Action, ...]
    world: int = 2
    bucket_mb: float = 25.0
    accumulate: int = 1

    def options(self) -> dict[str, Any]:
        accumulation = {"accumulate": self.accumulate} if self.accumulate > 1 else {}
        return {"bucket_mb": self.bucket_mb, **accumulation}

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of the parts that Dynamo compiles together; the head follows the last ones."""
        starts = [0, *(i for i, part in enumerate(self.parts) if i and part.break_before)]
        return list(zip(starts, [*starts[1:], len(self.parts)], strict=True))


# --- The model ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A part, as a module of one rank."""

    def __init__(self, part: Part, before: Block | None, rank: int) -> None:
        super().__init__()
        self.auxiliary, self.used = part.auxiliary, rank in part.used_on
        tied = part.tied and before is not None
        self.width = before.width if tied else part.width
        self.inner = nn.Linear(FEATURES, self.width)
        if tied:
            self.inner.weight = before.inner.weight
        self.norm = NORMS[part.norm](self.width)
        self.outer = nn.Linear(self.width, FEATURES)
        if part.frozen:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.norm(self.inner(x))))


class Region(nn.Module):
    """Blocks that Dynamo compiles together, and what comes behind the graph break.

    Not a loop with a break in it: Dynamo runs such a function eagerly as a whole.
    """

    def __init__(self, blocks: list[Block], rest: nn.Module) -> None:
        super().__init__()
        self.blocks, self.rest = nn.ModuleList(blocks), rest

    def forward(self, x: torch.Tensor, extras: tuple[torch.Tensor, ...]) -> Any:
        for block in self.blocks:
            if block.used and block.auxiliary:
                extras = (*extras, block(x))
            elif block.used:
                x = block(x)
        if isinstance(self.rest, Region):
            torch._dynamo.graph_break()
            return self.rest(x, extras)
        return self.rest(x), extras


class Model(nn.Module):
    """All parts, then a linear head that is used and trained on every rank."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for part in program.parts:
            before = self.blocks[-1] if len(self.blocks) else None
            self.blocks.append(Block(part, before, rank))
        rest: nn.Module = nn.Linear(FEATURES, 1)
        for start, end in reversed(program.spans()):
            rest = Region(list(self.blocks[start:end]), rest)
        self.first = rest

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.first(x, ())


# --- A rank ------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's run of a program, compiled or, as what it is compared with, eagerly."""

    def __init__(self, program: Program, rank: int, compiled: bool) -> None:
        self.program, self.rank, self.compiled = program, rank, compiled
        torch.manual_seed(0)
        # In double precision rounding can't pass for a mistake (a norm of two features has gradients near 0).
        self.model = Model(program, rank).double()
        self.call = self.model
        if compiled:
            self.call = torch.compile(self.model, backend=BACKEND, options=program.options())
        # Momentum and decay tell a gradient of zeros from none.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01
        )
        self.losses: list[Any] = []
        self.output: torch.Tensor | None = None
        self._forwards = self._backwards = 0

    def forward(self, rows: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(100 * self._forwards + self.rank)
        self._forwards += 1
        x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        return self.call(x)

    def backward(self, loss: torch.Tensor, sync: bool = True) -> None:
        if self.compiled:
            with contextlib.nullcontext() if sync else fxpasses.runtime(self.model).no_sync():
                loss.backward()
            return
        loss.backward()
        self._backwards += 1
        if sync and self._backwards % self.program.accumulate == 0:
            average_gradients(self.model)
            take_running_statistics(self.model)

    def snapshot(self) -> dict[str, torch.Tensor | None]:
        """Copies of all that is compared."""
        parameters = dict(self.model.named_parameters())
        found = {f"the gradient of {name}": p.grad for name, p in parameters.items()}
        found |= {"the output": self.output, **parameters, **running_statistics(self.model)}
        return {name: None if t is None else t.detach().clone() for name, t in found.items()}


def average_gradients(model: nn.Module) -> None:
    """The mean over the ranks, of which some may have no gradient; None where no rank has one.

    What was averaged before is alike on all ranks, so averaging it again changes nothing.
    """
    for parameter in model.parameters():
        ranks = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(ranks)
        if ranks:
            held = parameter.grad
            total = torch.zeros_like(parameter) if held is None else held.clone()
            dist.all_reduce(total)
            parameter.grad = total / dist.get_world_size()


def take_running_statistics(model: nn.Module) -> None:
    for tensor in running_statistics(model).values():
        dist.broadcast(tensor, 0)


def running_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.named_buffers() if t.is_floating_point()}


def run(program: Program, rank: int, compiled: bool) -> list[dict[str, torch.Tensor | None]]:
    """What a rank has after each action."""
    trainer, found = Trainer(program, rank, compiled), []
    for action in program.actions:
        action.perform(trainer)
        found.append(trainer.snapshot())
    return found


def compare(program: Program, rank: int) -> str:
    """What first differs from eager code on this rank; empty if nothing does."""
    torch._dynamo.config.recompile_limit = 64  # freezing and batch sizes recompile
    warnings.filterwarnings("ignore", "the hardened backend was asked for")  # not by eager code
    pairs = zip(run(program, rank, False), run(program, rank, True), strict=True)
    torch._dynamo.reset()
    gc.collect()  # the next program's tensors shall not meet this one's
    for index, (expected, found) in enumerate(pairs):
        for name, tensor in expected.items():
            if difference := _difference(tensor, found[name]):
                return f"after action {index}, {program.actions[index]}: {name}: {difference}"
    return ""


def _difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
    if expected is None or found is None:
        return "" if expected is found else f"expected {expected}, found {found}"
    if torch.allclose(expected, found, rtol=1e-4, atol=1e-6):
        return ""
    return f"expected {expected.tolist()}, found {found.tolist()}"


# --- The ranks ---------------------------------------------------------------------------------------------

Task = Callable[[Any, int], str]
DIFFERS = "differs"


class Ranks:
    """Processes that work on one program after the other; new ones are started after a failure.

    Args:
        task: what each rank does with a program; returns what is wrong.
    """

    def __init__(self, world: int, task: Task = compare, limit_s: float = TIME_LIMIT_S) -> None:
        self._world, self._task, self._limit_s = world, task, limit_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def check(self, program: Any) -> None:
        """
        Raises:
            AssertionError: naming the program and, for each rank, what is wrong.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(program)
        wrong = {rank: words for rank, words in self._answers().items() if words}
        if not all(words.startswith(DIFFERS) for words in wrong.values()):
            self.stop()  # in the middle of something
        if wrong:
            listed = "\n".join(f"rank {rank} {words}" for rank, words in sorted(wrong.items()))
            raise AssertionError(f"{program!r}\n{listed}")

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            args = (theirs, self._task, rank, self._world, self._folder.name)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self) -> dict[int, str]:
        """By rank: empty, or what is wrong."""
        busy = dict(enumerate(self._pipes))
        answers: dict[int, str] = {}
        started = time.monotonic()
        deadline = started + self._limit_s
        while busy and (left_s := deadline - time.monotonic()) > 0:
            ready = wait(list(busy.values()), left_s)
            for rank in [rank for rank, pipe in busy.items() if pipe in ready]:
                answers[rank] = self._answer(rank, busy.pop(rank))
                if answers[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        seconds = time.monotonic() - started
        return answers | dict.fromkeys(busy, f"was still busy after {seconds:.0f} s")

    def _answer(self, rank: int, pipe: Connection) -> str:
        try:
            return pipe.recv()
        except EOFError:
            self._processes[rank].join(5)
            return f"died with exit code {self._processes[rank].exitcode}"


def _serve(pipe: Connection, task: Task, rank: int, world: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GLOO_TIMEOUT_S),
    )
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            program = pipe.recv()
            try:
                difference = task(program, rank)
                pipe.send(f"{DIFFERS} {difference}" if difference else "")
            except Exception:
                pipe.send(f"raised\n{traceback.format_exc()}")


# --- The tests ---------------------------------------------------------------------------------------------


def parts() -> st.SearchStrategy[Part]:
    some_ranks = st.sampled_from([ALL, (), (0,), (1,), (1, 2)])
    return st.builds(
        Part,
        width=st.integers(2, 5),
        norm=st.sampled_from(list(NORMS)),
        tied=st.booleans(),
        frozen=st.booleans(),
        auxiliary=st.booleans(),
        used_on=some_ranks,
        break_before=st.booleans(),
    )


def steps() -> st.SearchStrategy[Step]:
    some_ranks = st.sampled_from([ALL, (), (0,), (1,), (1, 2)])
    return st.builds(
        Step,
        pattern=st.sampled_from(PATTERNS + PATTERNS_WITHOUT_SYNC),
        batch=st.integers(4, 6),
        uneven=st.booleans(),
        auxiliary_on=some_ranks,
    )


def other_actions() -> st.SearchStrategy[list[Action]]:
    zero = st.builds(ZeroGrad, set_to_none=st.booleans())
    freeze = st.builds(Freeze, part=st.integers(0, 3), frozen=st.booleans())
    return st.lists(
        st.one_of(zero, freeze, st.builds(Evaluate, batch=st.integers(1, 6))), max_size=2
    )


@st.composite
def actions(draw: st.DrawFn) -> tuple[Action, ...]:
    """One to four steps, with something else between them or not."""
    rounds = draw(st.lists(st.tuples(other_actions(), steps()), min_size=1, max_size=4))
    last = draw(other_actions())
    return (*(a for others, step in rounds for a in (*others, step)), *last)


def programs() -> st.SearchStrategy[Program]:
    found = st.builds(
        Program,
        parts=st.lists(parts(), min_size=1, max_size=4).map(tuple),
        actions=actions(),
        world=st.sampled_from(WORLDS),
        bucket_mb=st.sampled_from([25.0, 1e-6]),
        accumulate=st.sampled_from([1, 1, 2, 3]),
    )
    return found.filter(has_the_backwards_it_needs).filter(says_once_when_to_reduce)


def says_once_when_to_reduce(program: Program) -> bool:
    """By `accumulate` or by `no_sync()`."""
    by_hand = any("n" in a.pattern for a in program.actions if isinstance(a, Step))
    return program.accumulate == 1 or not by_hand


def has_the_backwards_it_needs(program: Program) -> bool:
    """Whether each region that differs over the ranks, or has a batch norm, has its backward on all ranks.

    Such a region needs a part that is used and trained on all ranks throughout. (The head is one for the last.)
    """
    touched = {a.part % len(program.parts) for a in program.actions if isinstance(a, Freeze)}
    partial = any(_on_some(a.auxiliary_on, program) for a in program.actions if isinstance(a, Step))

    def needs_one(part: Part) -> bool:
        differs = _on_some(part.used_on, program) or (part.auxiliary and partial)
        return differs or part.norm == "batch"

    def ensures_one(index: int, part: Part) -> bool:
        return part.used_on == ALL and not (part.auxiliary or part.frozen or index in touched)

    numbered = list(enumerate(program.parts))
    regions = [numbered[start:end] for start, end in program.spans()[:-1]]
    return all(
        any(ensures_one(*pair) for pair in region) or not any(needs_one(part) for _, part in region)
        for region in regions
    )


def _on_some(ranks: tuple[int, ...], program: Program) -> bool:
    return 0 < len(set(ranks) & set(range(program.world))) < program.world


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """By number of ranks; kept for all programs, since starting them takes longer than most programs."""
    started = {world: Ranks(world) for world in WORLDS}
    yield started
    for members in started.values():
        members.stop()


@pytest.mark.timeout(SHRINKING_S + EXAMPLES * 10)
@settings(
    max_examples=EXAMPLES,
    derandomize=LONG_RUN not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(program=programs())
# Each was wrong once: the union of one rank's part, buckets of one gradient; a part that only a later
# micro-batch's rank has; a frozen part's gradient from before; None that became zeros with what was left.
@example(Program((Part(used_on=(0,)),), (Step(),), bucket_mb=1e-6))
@example(Program((Part(used_on=(1,)),), (Step(), Step()), accumulate=2))
@example(Program((Part(),), (Step(), Freeze(), Step(), Freeze(frozen=False), Step())))
@example(
    Program(
        (Part(used_on=(1,)), Part(tied=True, auxiliary=True, used_on=(1, 2))),
        (Step("fbfb", auxiliary_on=(0,)),),
        world=3,
        accumulate=2,
    )
)
def test_programs_train_as_averaged_by_hand(ranks, program):
    ranks[program.world].check(program)


def hang_on_rank_1(program: str, rank: int) -> str:
    time.sleep(60 * rank)
    return ""


def test_a_program_that_takes_too_long_is_named_with_its_ranks():
    ranks = Ranks(2, hang_on_rank_1, limit_s=2)
    with pytest.raises(AssertionError, match="the program\\'?\nrank 1 was still busy after 2 s"):
        ranks.check("the program")
    ranks.stop()
