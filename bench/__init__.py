"""Benchmarks: every number in the README has a script here that prints it."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # what --keep writes
