"""Programs for campaigns."""

import os

import torch
from torch import nn


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(6, 8),)


class _Deadly(nn.Module):
    """Ends the process, or stops for good, where a value is not finite."""

    def __init__(self, end) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.end = nn.Linear(8, 8), nn.Linear(8, 8), end

    def forward(self, x):
        y = self.a(x)
        _look(y, self.end)
        return self.b(y)


@torch.compiler.disable
def _look(y, end):
    if not bool(y.isfinite().all()):
        end()


def _end():
    os._exit(9)


def _stop():
    import time

    time.sleep(3600)


def ends():
    return _Deadly(_end), (torch.randn(2, 8),)


def stops():
    return _Deadly(_stop), (torch.randn(2, 8),)


def random():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x):
            return self.a(x) * _different(x)

    return Random(), (torch.randn(2, 8),)


@torch.compiler.disable
def _different(x):
    _different.calls = getattr(_different, "calls", 0) + 1
    return float(_different.calls)
