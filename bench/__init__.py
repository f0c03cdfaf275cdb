"""Benchmarks: every number in the README has a script here that prints it."""
