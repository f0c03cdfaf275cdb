"""Where operators work: the table of docs/kernels.md is made of what is found here."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import custom_ops
from tests.custom_ops.cases import MODULES, Call, cases, same, tensors_of

NAMES = list(MODULES)
ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/kernels.md"
BEGIN, END = "<!-- table: compatibility -->\n", "<!-- end -->\n"
# Of an operator to the name of its functions, and of columns to packages with implementations.
COLUMNS = ("eager", "compile", "export", "AOTInductor")
PACKAGES = {
    "CPU (C++)": "cpp",
    "Triton": "triton",
    "CUDA C++": "cuda",
    "plain PyTorch": "reference",
}
FUNCTIONS = {"broken": "checksums"}


@functools.cache
def expected() -> dict[str, list[torch.Tensor]]:
    return Call(NAMES)(tensors_of(NAMES))


def working(results: dict[str, list[torch.Tensor]]) -> set[str]:
    return {name for name in NAMES if same(results[name], expected()[name])}


def in_compile() -> set[str]:
    return working(torch.compile(Call(NAMES), fullgraph=True)(tensors_of(NAMES)))


@functools.cache
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Call(NAMES), (tensors_of(NAMES),))


def in_export() -> set[str]:
    nodes = {
        str(n.target).split(".")[1] for n in exported().graph.nodes if "fxpasses" in str(n.target)
    }
    assert nodes == set(NAMES)
    return working(exported().module()(tensors_of(NAMES)))


def in_aot_inductor(folder: Path) -> set[str]:
    package = torch._inductor.aoti_compile_and_package(
        exported(),
        package_path=str(folder / "operators.pt2"),
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,  # dearer than the one file that needs them
        },
    )
    return working(torch._inductor.aoti_load_package(package)(tensors_of(NAMES)))


def implemented(package: str) -> set[str]:
    """Operators whose function the package has. That it is right, others test."""
    found = set()
    for name, family in MODULES.items():
        source = (Path(custom_ops.__file__).parent / package / f"{family}.py").read_text()
        functions = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
        if FUNCTIONS.get(name, name) in functions:
            found.add(name)
    return found


def table(columns: dict[str, set[str]]) -> str:
    rows = [
        "| `{}` | {} |".format(
            name, " | ".join("yes" if name in column else "no" for column in columns.values())
        )
        for name in NAMES
    ]
    head = f"| operator | {' | '.join(columns)} |"
    return "\n".join([head, "|" + "---|" * (len(columns) + 1), *rows, ""])


@pytest.mark.inductor
def test_the_table_is_what_is_found(tmp_path):
    found = (set(expected()), in_compile(), in_export(), in_aot_inductor(tmp_path))
    columns = dict(zip(COLUMNS, found, strict=True))
    columns |= {column: implemented(package) for column, package in PACKAGES.items()}
    made = table(columns)
    before, rest = DOCUMENT.read_text().split(BEGIN)
    written, after = rest.split(END)
    if written != made:
        (tmp_path / "kernels.md").write_text(before + BEGIN + made + END + after)
        pytest.fail(
            f"docs/kernels.md says something else; what is found is in {tmp_path}/kernels.md"
        )


def test_every_operator_is_in_it():
    """Of those that have kernels; graphs are marked with others."""
    registered = {
        name.removeprefix("fxpasses::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fxpasses::")
    }
    assert registered - {"disturb", "accumulate", "changed"} == set(NAMES) == set(cases())


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake(name):
    torch.library.opcheck(getattr(torch.ops.fxpasses, name).default, cases()[name])


def test_functionalised():
    """None writes an input, or returns one; none is recorded in a CUDA graph of Inductor's."""
    for name in NAMES:
        schema = getattr(torch.ops.fxpasses, name).default._schema
        assert not schema.is_mutable
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.fxpasses, name).default.tags
        assert all(result.alias_info is None for result in schema.returns)


@pytest.mark.parametrize("name", ["unscale", "strike", "encode16", "topk_encode", "seal"])
def test_dynamic_shapes(name):
    """One graph for buckets of different sizes, where an operator does not have them as constants."""

    def call(flat: torch.Tensor, other: torch.Tensor):
        operator = getattr(torch.ops.fxpasses, name)
        numel = flat.shape[0]
        args = {
            "unscale": (flat, other[0]),
            "strike": (flat, torch.ones(5, dtype=torch.int64), 1),
            "encode16": (flat, numel, 2, "bf16"),
            "topk_encode": (flat, other, numel, 0.1),
            "seal": (flat.view(torch.uint8), 1),
        }[name]
        return operator(*args)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for numel in (64, 96, 320):
        flat, other = torch.randn(2, numel)
        results, wanted = compiled(flat, other), call(flat, other)
        results, wanted = (list(r) if isinstance(r, tuple) else [r] for r in (results, wanted))
        assert same(results, wanted)
    assert counter.frame_count == 1
