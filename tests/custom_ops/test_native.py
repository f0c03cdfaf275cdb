"""Building the kernels, and choosing not to."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from custom_ops import native, quantise
from custom_ops.layout import Layout
from tests.custom_ops.buckets import reference

SMALL = 'extern "C" void fxpasses_nothing() {}'


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """An empty cache, and sources that are quickly compiled."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    build = native.library.__wrapped__
    return lambda: build(), sources, tmp_path / "cache" / "fxpasses"


def test_built_once_with_a_message(own_cache, capsys):
    build, _, cache = own_cache
    build()
    (binary,) = cache.glob("*.so")
    assert f"building its CPU kernels with g++, once: {binary}" in capsys.readouterr().err
    build()
    assert capsys.readouterr().err == ""
    assert list(cache.glob("*.so")) == [binary]


def test_another_source_is_another_binary(own_cache):
    build, sources, cache = own_cache
    build()
    (sources / "common.h").write_text("// changed")
    build()
    assert len(list(cache.glob("*.so"))) == 2


def test_processes_that_start_together_build_once(own_cache):
    _, sources, cache = own_cache
    code = (
        "import pathlib; from custom_ops import native\n"
        f"native.SOURCES = pathlib.Path({str(sources)!r}); native.library()"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    messages = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert messages.count("building") == 1 and len(list(cache.glob("*.so"))) == 1


def test_no_compiler(own_cache, monkeypatch):
    build, _, _ = own_cache
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"CXX=no-such-compiler.*FXPASSES_KERNELS=reference"):
        build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        RuntimeError, match=r"no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\).*install"
    ):
        build()


def test_a_compiler_that_fails_is_quoted(own_cache):
    build, sources, cache = own_cache
    (sources / "small.cpp").write_text("#error this is wrong")
    with pytest.raises(
        RuntimeError, match=r"can't be built: g\+\+[\s\S]*this is wrong[\s\S]*=reference"
    ):
        build()
    assert not list(cache.glob("*.so"))


def test_reference_is_never_chosen_silently(monkeypatch):
    def unavailable():
        raise RuntimeError("no kernels")

    monkeypatch.setattr(native, "library", unavailable)
    layout = Layout((8,))
    with pytest.raises(RuntimeError, match="no kernels"):
        quantise.quantise(torch.ones(8), None, None, *layout.fields)
    with reference():
        payload, _ = quantise.quantise(torch.ones(8), None, None, *layout.fields)
        back = quantise.dequantise(payload[None], *layout.fields)
    torch.testing.assert_close(back, torch.ones(8), rtol=0, atol=1 / 254)
