"""Tools for testing passes without a training run."""

from fxpasses.testing.capture import Captured, capture

__all__ = ["Captured", "capture"]
