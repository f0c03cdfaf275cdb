"""Rates of a machine: as options, as a profile, as words on a command line."""

from __future__ import annotations

import tomllib

import pytest

from fxpasses.schedule.machine import Machine, quantity


def test_what_is_not_given_is_the_default():
    machine = Machine.parse({"flops": 1e12, "encode_s": {"int4": 2e-9}})
    assert machine.flops == 1e12 and machine.memory == Machine().memory
    assert machine.encode_s == {**Machine().encode_s, "int4": 2e-9}
    assert Machine.parse(None) == Machine() and Machine.parse(machine) is machine


def test_a_table_reads_back():
    machine = Machine(flops=1.25e11, host_s=3e-10, encode_s={**Machine().encode_s, "topk": 5e-9})
    assert Machine.parse(tomllib.loads(machine.table())["machine"]) == machine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "got 3; expected a mapping"),
        ({"flop": 1.0}, "unknown key 'flop'; did you mean 'flops'?"),
        ({"flops": 0}, "got flops=0; expected a positive number"),
        ({"memory": "20us"}, "got memory='20us'; expected a positive number"),
        ({"host_s": -1.0}, "got host_s=-1.0; expected a number, 0 or more"),
        ({"encode_s": {"int3": 1.0}}, "encode_s has no scheme 'int3'"),
        ({"decode_s": 1.0}, "got decode_s=1.0; expected a mapping of schemes"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=r"option 'machine'") as raised:
        Machine.parse(given)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        ("bandwidth", "25Gbit", 25e9 / 8),
        ("bandwidth", "100 mbit/s", 12.5e6),
        ("bandwidth", "3GB/s", 3e9),
        ("latency", "20us", 20e-6),
        ("latency", "0s", 0.0),
        ("memory", "2GiB", 2**31),
    ],
)
def test_quantities_have_units(kind, word, value):
    assert quantity(kind, word) == pytest.approx(value)


@pytest.mark.parametrize("word", ["25", "Gbit", "-1Gbit", "25Gbyte", "0gbit", "nangbit"])
def test_a_quantity_without_a_unit_is_refused(word):
    with pytest.raises(ValueError, match=r"expected a number and one of gbit, .* such as '25Gbit'"):
        quantity("bandwidth", word)
