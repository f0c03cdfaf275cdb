"""Operators of the `fxpasses::` namespace, registered through torch.library.

Nothing here imports `fxpasses`. An operator comes with schema, fake implementation and a reference in plain
PyTorch; faster implementations for a device stand behind the same schema. The dense all-reduce of today
needs no operator of its own: what it does, Inductor fuses.
"""
