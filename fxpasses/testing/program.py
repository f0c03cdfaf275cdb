"""Programs as plain data: a list of layers, from which a module, its inputs and its source follow.

The source comes first: a program renders itself as text, and what is built is that text, executed. So what a
failing test prints is exactly what failed.

Between layers a program holds `x` of shape (batch, width). A layer writes the lines of its constructor and of
its part of `forward`, and says how wide `x` is afterwards; whatever it needs inside (channels, heads,
sequences), it makes of the width. So any list of layers is a program, and shrinks one layer at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import sys
import types
from collections.abc import Callable

import torch
from torch import nn

from fxpasses.exported import exported
from fxpasses.graph import TrainingGraph, without_warnings_of_pytrees
from fxpasses.testing.arguments import known
from fxpasses.testing.capture import Captured, capture

_MODULE = "fxpasses_drawn_program"
INPUT_LAYOUTS = ("contiguous", "transposed", "strided")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: its kind (one of `KINDS`) and a number that means something else for each of them."""

    kind: str
    size: int = 1

    def __post_init__(self) -> None:
        known("Layer: kind", self.kind, KINDS)


@dataclasses.dataclass(frozen=True)
class Lines:
    """What a layer writes.

    Attributes:
        init: lines of the constructor.
        forward: lines of `forward`; they read and write `x`.
        width: of `x` afterwards.
        returns: a value that the module returns beside `x`.
    """

    init: tuple[str, ...]
    forward: tuple[str, ...]
    width: int
    returns: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A module and its inputs.

    Attributes:
        layers: in order.
        batch, width: the shape of the input.
        layout: of the input in memory, one of `INPUT_LAYOUTS`.
        dynamic: whether the batch may vary (`torch._dynamo.mark_dynamic`).
        grad_input: whether the input requires grad.
        seed: of parameters, input and dropout.
    """

    layers: tuple[Layer, ...]
    batch: int = 2
    width: int = 2
    layout: str = "contiguous"
    dynamic: bool = False
    grad_input: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        known("Program: layout", self.layout, INPUT_LAYOUTS)

    def source(self) -> str:
        """The program as a script that runs alone."""
        return _script(self)

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The module and its inputs."""
        path, text = f"<program {self!r}>", self.source()
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        # Dynamo looks up globals in the module of this name; one program at a time is enough.
        module = sys.modules[_MODULE] = types.ModuleType(_MODULE)
        exec(compile(text, path, "exec"), module.__dict__)
        return module.model, module.inputs

    def captured(self) -> Captured:
        """Its joint graph and its backward graph, captured once; copy them before you write to them."""
        return _captured(self)

    def exported(self, training: bool = True) -> TrainingGraph:
        """Its forward as `torch.export` has it, in training mode or in evaluation; made once, as `captured`."""
        return _exported(self, training)

    @property
    def uses_tokens(self) -> bool:
        return any(layer.kind == "embedding" for layer in self.layers)


# Every pass is shown the same programs, one for each 25 of 10,000 graphs: fewer places than programs and none
# would be found again. Each takes about a megabyte.
@functools.lru_cache(maxsize=512)
def _captured(program: Program) -> Captured:
    torch._dynamo.reset()
    model, inputs = program.build()
    return capture(model, *inputs)


@functools.lru_cache(maxsize=512)
def _exported(program: Program, training: bool) -> TrainingGraph:
    model, inputs = program.build()
    batch = {0: torch.export.Dim.DYNAMIC} if program.dynamic else None
    sizes = tuple(batch for _ in inputs)
    with without_warnings_of_pytrees():
        done = torch.export.export(model.train(training), inputs, dynamic_shapes=sizes)
        return exported(done.run_decompositions())


def forget_captured() -> None:
    """Capture programs anew from now on."""
    _captured.cache_clear()
    _exported.cache_clear()


def _linear(i: int, width: int, size: int) -> Lines:
    return Lines((f"self.m{i} = nn.Linear({width}, {size})",), (f"x = self.m{i}(x)",), size)


def _act(function: str) -> Callable[[int, int, int], Lines]:
    return lambda i, width, size: Lines((), (f"x = {function}",), width)


def _conv1d(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Conv1d(1, {size}, 3, padding=1)"
    return Lines((init,), (f"x = self.m{i}(x.unsqueeze(1)).flatten(1)",), size * width)


def _conv2d(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Conv2d(1, {size}, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)"
    return Lines((init,), (f"x = self.m{i}(x[:, None, None]).mean(2).flatten(1)",), size * width)


def _batch_norm(i: int, width: int, size: int) -> Lines:
    return Lines((f"self.m{i} = nn.BatchNorm1d({width})",), (f"x = self.m{i}(x)",), width)


def _layer_norm(i: int, width: int, size: int) -> Lines:
    return Lines((f"self.m{i} = nn.LayerNorm({width})",), (f"x = self.m{i}(x)",), width)


def _group_norm(i: int, width: int, size: int) -> Lines:
    return Lines((f"self.m{i} = nn.GroupNorm(1, {width})",), (f"x = self.m{i}(x)",), width)


def _attention(i: int, width: int, size: int) -> Lines:
    """Over the width as a sequence; causal for even sizes, with a mask of its own for odd ones."""
    init = (
        f"self.m{i} = nn.Linear(1, 6)",
        f"self.register_buffer('mask{i}', torch.ones({width}, {width}).tril().bool())",
    )
    mask = "is_causal=True" if size % 2 == 0 else f"attn_mask=self.mask{i}"
    forward = (
        f"q, k, v = self.m{i}(x.unsqueeze(2)).chunk(3, dim=2)",
        f"x = F.scaled_dot_product_attention(q, k, v, {mask}).mean(2)",
    )
    return Lines(init, forward, width)


def _embedding(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Embedding(3, {size})"
    return Lines((init,), (f"x = torch.cat([x, self.m{i}(tokens)], dim=1)",), width + size)


def _cell(kind: str, result: str) -> Callable[[int, int, int], Lines]:
    def lines(i: int, width: int, size: int) -> Lines:
        init = f"self.m{i} = nn.{kind}({width}, {size})"
        return Lines((init,), (f"x = self.m{i}(x){result}",), size)

    return lines


def _over_batch(i: int, width: int, size: int) -> Lines:
    """Each row as a mean of all rows: products whose columns, and whose sums, go over the batch."""
    return Lines((), ("x = (x @ x.t()).softmax(1) @ x",), width)


def _residual(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Linear({width}, {width}, bias=False)"
    return Lines((init,), (f"x = x + self.m{i}(x).relu()",), width)


def _views(i: int, width: int, size: int) -> Lines:
    return Lines((), ("x = x.t().flip(0).t().unsqueeze(0).expand(2, -1, -1).sum(0)",), width)


def _in_place(i: int, width: int, size: int) -> Lines:
    forward = (f"x = x * self.scale{i}", "x.mul_(2)", "x[:, :1].add_(1)", f"self.count{i}.add_(1)")
    init = (
        f"self.scale{i} = nn.Parameter(torch.tensor(1.5))",
        f"self.register_buffer('count{i}', torch.zeros(()))",
    )
    return Lines(init, forward, width)


def _dropout(i: int, width: int, size: int) -> Lines:
    return Lines((), ("x = F.dropout(x, 0.5)",), width)


def _dropout1d(i: int, width: int, size: int) -> Lines:
    """One draw for each channel."""
    return Lines((), ("x = F.dropout1d(x.unsqueeze(-1), 0.4).squeeze(-1)",), width)


def _tied(i: int, width: int, size: int) -> Lines:
    init = f"self.w{i} = nn.Parameter(torch.randn({width}, {width}))"
    return Lines((init,), (f"x = F.linear(F.linear(x, self.w{i}).sin(), self.w{i})",), width)


def _frozen(i: int, width: int, size: int) -> Lines:
    init = (f"self.m{i} = nn.Linear({width}, {size})", f"self.m{i}.weight.requires_grad_(False)")
    return Lines(init, (f"x = self.m{i}(x)",), size)


def _cast(dtype: str) -> Callable[[int, int, int], Lines]:
    def lines(i: int, width: int, size: int) -> Lines:
        init = f"self.m{i} = nn.Linear({width}, {size}, dtype=torch.{dtype})"
        return Lines((init,), (f"x = self.m{i}(x.to(torch.{dtype})).float()",), size)

    return lines


def _cond(i: int, width: int, size: int) -> Lines:
    init = tuple(f"self.{branch}{i} = nn.Linear({width}, {size})" for branch in "ab")
    branches = f"lambda x: self.a{i}(x), lambda x: self.b{i}(x).sin()"
    return Lines(init, (f"x = torch.cond(x.sum() > 0, {branches}, (x,))",), size)


def _map(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Linear({width}, {size})"
    return Lines((init,), (f"x = map_over(lambda row: self.m{i}(row).sin(), x)",), size)


def _scan(i: int, width: int, size: int) -> Lines:
    init = f"self.m{i} = nn.Linear({width}, {width})"
    forward = f"_, x = scan(lambda c, row: (c.sin() + self.m{i}(row), c * row), torch.zeros_like(x[0]), x)"
    return Lines((init,), (forward,), width)


def _empty(i: int, width: int, size: int) -> Lines:
    init = f"self.nothing{i} = nn.Parameter(torch.empty(0, {size}))"
    return Lines((init,), (f"x = x + self.nothing{i}.sum()",), width)


def _branch(i: int, width: int, size: int) -> Lines:
    """A head with parameters of its own, which the module returns as well."""
    init = f"self.m{i} = nn.Linear({width}, {size})"
    return Lines((init,), (f"y{i} = self.m{i}(x)",), width, returns=f"y{i}")


def _detached(i: int, width: int, size: int) -> Lines:
    """An output that nothing is learnt from."""
    return Lines((), (f"y{i} = x.detach().sum()",), width, returns=f"y{i}")


KINDS: dict[str, Callable[[int, int, int], Lines]] = {
    "linear": _linear,
    "relu": _act("x.relu()"),
    "gelu": _act("F.gelu(x)"),
    "branch": _branch,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "conv1d": _conv1d,
    "conv2d": _conv2d,
    "attention": _attention,
    "embedding": _embedding,
    "rnn": _cell("RNNCell", ""),
    "gru": _cell("GRUCell", ""),
    "lstm": _cell("LSTMCell", "[0]"),
    "over_batch": _over_batch,
    "residual": _residual,
    "views": _views,
    "in_place": _in_place,
    "dropout": _dropout,
    "dropout1d": _dropout1d,
    "tied": _tied,
    "frozen": _frozen,
    "bfloat16": _cast("bfloat16"),
    "float64": _cast("float64"),
    "empty": _empty,
    "detached": _detached,
    "cond": _cond,
    "map": _map,
    "scan": _scan,
}
# Where torch itself needs more than none: a batch of one has no variance, an empty one nothing to scan.
SMALLEST_BATCH = {"batch_norm": 2, "group_norm": 2, "scan": 1, "map": 1}


_SCRIPT = """import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan


class Program(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x{tokens}):
        {forward}
        return {result}


torch.manual_seed({seed})
model = Program()
x = {example}{requires_grad}
inputs = ({inputs},)
{dynamic}
if __name__ == "__main__":
    outputs = model(*inputs)
    print(outputs)
"""

_DYNAMIC = """for each in inputs:
    torch._dynamo.mark_dynamic(each, 0)
"""
_EXAMPLES = {
    "contiguous": "torch.randn({batch}, {width})",
    "transposed": "torch.randn({width}, {batch}).t()",
    "strided": "torch.randn({batch}, 2 * {width})[:, ::2]",
}


def _script(program: Program) -> str:
    width = program.width
    init, forward, returned = (
        ["self.first = nn.Parameter(torch.ones(()))"],
        ["x = x * self.first"],
        ["x"],
    )
    for position, layer in enumerate(program.layers):
        lines = KINDS[layer.kind](position, width, layer.size)
        init += lines.init
        forward += lines.forward
        returned += filter(None, [lines.returns])
        width = lines.width
    shape = {"batch": program.batch, "width": program.width}
    return _SCRIPT.format(
        init="\n        ".join(init),
        forward="\n        ".join(forward),
        result=", ".join(returned),
        tokens=", tokens" if program.uses_tokens else "",
        seed=program.seed,
        example=_EXAMPLES[program.layout].format(**shape),
        requires_grad=".requires_grad_()" if program.grad_input else "",
        inputs=f"x, torch.arange({program.batch}) % 3" if program.uses_tokens else "x",
        dynamic=_DYNAMIC if program.dynamic else "",
    )
