"""Which implementation runs, and what is said where none can."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from custom_ops import kernels, quantise
from custom_ops.cuda import nvrtc
from custom_ops.layout import Layout

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def set_choice(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def choose(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv(kernels.CHOICE, raising=False)
        else:
            monkeypatch.setenv(kernels.CHOICE, value)

    choose(None)
    return choose


@dataclasses.dataclass
class Machine:
    """What there is, as the dispatcher is told."""

    capability: tuple[int, int] = (9, 0)
    triton: bool = True
    nvrtc: bool = True


@pytest.fixture
def machine(monkeypatch):
    has = Machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(kernels, "has_triton", lambda: has.triton)
    monkeypatch.setattr(nvrtc, "is_found", lambda: has.nvrtc)
    kernels._default_on_gpu.cache_clear()
    yield has
    kernels._default_on_gpu.cache_clear()


def test_an_unknown_choice(set_choice):
    set_choice("fast")
    for device in (CPU, GPU):
        with pytest.raises(
            ValueError, match="FXPASSES_KERNELS='fast': expected one of triton, cuda, reference"
        ):
            kernels.implementation(device)
    layout = Layout((8,))
    with pytest.raises(ValueError, match="FXPASSES_KERNELS='fast'"):
        quantise.quantise(torch.ones(8), None, None, *layout.fields)


def test_on_the_cpu(set_choice, monkeypatch):
    assert kernels.implementation(CPU) == "cpp"
    set_choice("reference")
    assert kernels.implementation(CPU) == "reference"
    set_choice("cuda")
    with pytest.raises(RuntimeError, match="FXPASSES_KERNELS=cuda: these kernels need a GPU"):
        kernels.implementation(CPU)
    set_choice("triton")
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    with pytest.raises(RuntimeError, match="triton: these kernels need a GPU.*TRITON_INTERPRET=1"):
        kernels.implementation(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.implementation(CPU) == "triton"
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="triton can't be imported; install it"):
        kernels.implementation(CPU)


def test_on_a_gpu(set_choice, machine):
    assert kernels.implementation(GPU) == "triton"
    for name in kernels.CHOICES:
        set_choice(name)
        assert kernels.implementation(GPU) == name
    machine.triton = False
    set_choice("triton")
    with pytest.raises(RuntimeError, match="triton can't be imported; install it, or choose cuda"):
        kernels.implementation(GPU)


def test_without_triton(set_choice, machine):
    machine.triton = False
    assert kernels.implementation(GPU) == "cuda"


def test_without_triton_and_nvrtc(set_choice, machine):
    machine.triton = machine.nvrtc = False
    with pytest.warns(UserWarning, match="neither triton nor NVRTC is installed"):
        assert kernels.implementation(GPU) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.implementation(GPU) == "reference"  # said once


def test_an_old_gpu(set_choice, machine):
    machine.capability = (7, 5)
    for name in (None, "triton", "cuda"):
        set_choice(name)
        with pytest.raises(RuntimeError, match="Card is sm_75: the kernels need sm_80 or newer"):
            kernels.implementation(GPU)
    set_choice("reference")
    assert kernels.implementation(GPU) == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(set_choice):
    with pytest.raises(RuntimeError, match="no GPU was found for tensors on cuda:0"):
        kernels.implementation(GPU)
    with pytest.raises(RuntimeError, match="no kernels for tensors on mps"):
        kernels.implementation(torch.device("mps"))
