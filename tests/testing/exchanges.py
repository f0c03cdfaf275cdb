"""What an exchange promises, on tensors: all ranks in one process, without a graph.

    flat, states ─▶ encode ─▶ launch ─▶ [recode ─▶ relaunch ─▶] decode ─▶ the mean, new states     on each rank

The mean is the same everywhere; it and the new states hold, element by element, what all ranks had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from custom_ops.layout import Layout, Layout16, TopKLayout
from fxpasses.codecs import loss_bound
from fxpasses.compression import Scheme
from fxpasses.exchange import ROUNDS
from fxpasses.powersgd import SUBSPACE
from fxpasses.testing.check import settings
from fxpasses.testing.oracles.numerics import bitwise
from fxpasses.testing.strategies import SEEDS
from tests.testing.compression import EPS, is_thin, only_scheme, states_of
from tests.testing.exchanged import CPU, Exchanged, Parameters, Values, exchange, exchanges_of

TWO_LEGS_FROM = 3  # ranks
SCHEMES = (
    *("int8", "int8:group=16:symmetric=false", "int8:feedback=false", "int8:stochastic=true"),
    *("int4", "int4:second_bits=4", "int4:group=32:rotate=true", "int4:feedback=ef21"),
    *("int4:stochastic=true:feedback=ef21", "int8:stochastic=true:feedback=false"),
    *("topk:ratio=0.3", "topk:ratio=0.3:momentum=0.5", "topk:ratio=0.2:feedback=false"),
    *("topk:ratio=0.3:feedback=ef21", "topk:ratio=0.5:feedback=ef21:momentum=0.75"),
    *("bf16", "fp16", "none"),
    *("powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=2:feedback=false"),
)
SHAPES = ((), (3,), (0,), (33,), (100,), (5, 7), (8, 6), (6, 9), (2, 3, 4), (12, 10), (4, 8))


def exchanges_as_promised(examples: int) -> None:
    """The mean is right within what the scheme states; what is lost of it is kept, and nothing else."""

    @settings(examples)
    @given(
        st.sampled_from(SCHEMES),
        st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
        st.integers(1, 5),
        st.sampled_from((1.0, 1.0, 1e3, 1e-4, 1e-33)),
        st.booleans(),
        SEEDS,
    )
    # Shards of which one holds nothing, and one little.
    @example("int4", [(5, 7)], 4, 1.0, False, 0)
    def search(
        words: str, shapes: list[tuple[int, ...]], world: int, size: float, begun: bool, seed: int
    ) -> None:
        scheme, parameters = only_scheme(words), _named(shapes)
        exchanges = exchanges_of(scheme, parameters, world)
        if exchanges is None:
            thin = any(is_thin(shape, scheme.rank) for shape in shapes)
            assert scheme.scheme == "none" or (scheme.scheme == "powersgd" and not thin)
            return
        generator = torch.Generator().manual_seed(seed)
        flats = torch.randn(world, sum(map(math.prod, shapes)), generator=generator) * size
        olds = _drawn_states(scheme, parameters, world, size if begun else 0.0, generator)
        done = exchange(scheme, parameters, exchanges, flats, olds)
        for check in (_specified, _sent, _same_everywhere):
            check(done)
        if scheme.scheme == "powersgd":
            _projected(done)
        else:
            _conserved(done)
            _within_its_bound(done)
            _velocity(done)
        _tells(done, seed)

    for words in SCHEMES:
        for world in (2, 3):
            search = example(words, [(12, 10), (3,), (12, 10)], world, 1.0, True, 1)(search)
    search()


def seeds_differ(examples: int) -> None:
    """No two ranks, legs, buckets or steps round alike."""

    @settings(max(examples // 10, 3))
    @given(
        st.sampled_from(("int8:stochastic=true", "int4:stochastic=true:feedback=ef21")),
        st.integers(1, 4),
        st.integers(0, 2**30),
        st.integers(0, 1000),
    )
    def search(words: str, world: int, rounds: int, first: int) -> None:
        scheme, parameters = only_scheme(words), _named([(3,)])
        seeds = []
        for index in range(first, first + 24):
            exchanges = exchanges_of(scheme, parameters, world, index)
            assert exchanges is not None
            for step in (rounds, rounds + 1):
                olds = _drawn_states(scheme, parameters, world, 0.0, torch.Generator())
                for values in olds:
                    values[ROUNDS] = torch.tensor(step)
                done = exchange(scheme, parameters, exchanges, torch.ones(world, 3), olds)
                assert all(int(new[ROUNDS]) == step + 1 for new in done.news)
                seeds += [int(seed) for row in done.seeds for seed in row if seed is not None]
        legs = 2 if world >= TWO_LEGS_FROM else 1
        assert len(set(seeds)) == len(seeds) == 24 * 2 * world * legs

    search()


def bounds_are_reached(examples: int) -> None:
    """What a scheme states about its loss is not far above what it can lose."""

    @settings(max(examples // 10, 3))
    @given(st.sampled_from(("int8", "int4")), st.integers(1, 2), st.floats(1e-3, 1e3), SEEDS)
    # The smallest scale there is; and one that is just above a number of bf16, and so is rounded up by a step.
    @example("int8", 1, 2.0**-98, 0)
    @example("int4", 2, 2.0**-98, 0)
    @example("int8", 1, 127 * (1 + 2.0**-20), 0)
    @example("int4", 1, 7 * (1 + 2.0**-20), 0)
    def search(words: str, world: int, largest: float, seed: int) -> None:
        scheme, parameters = only_scheme(words + ":feedback=false"), _named([(64,)] * 32)
        exchanges = exchanges_of(scheme, parameters, world)
        assert exchanges is not None
        generator = torch.Generator().manual_seed(seed)
        flat = (2 * torch.rand(32, 64, generator=generator) - 1) * largest
        flat[:, 0] = largest
        flats = flat.flatten().expand(world, -1)
        done = exchange(scheme, parameters, exchanges, flats, [{}] * world)
        lost = float((done.means[0] - flats[0]).abs().max())
        bound = float(loss_bound(scheme, torch.full((world, 64), largest).double()).max())
        assert 0.98 * bound < lost <= bound, f"{lost} is lost, {bound} is said"

    search()


def _named(shapes: Sequence[tuple[int, ...]]) -> Parameters:
    return tuple((f"p{i}", tuple(shape)) for i, shape in enumerate(shapes))


def _numels(parameters: Parameters) -> list[int]:
    return [math.prod(shape) for _, shape in parameters]


def _kinds(scheme: Scheme) -> set[str]:
    """Of the states that a scheme keeps."""
    kinds = states_of(scheme) | ({ROUNDS} if scheme.stochastic else set())
    return kinds | ({SUBSPACE} if scheme.scheme == "powersgd" else set())


def _drawn_states(
    scheme: Scheme,
    parameters: Parameters,
    world: int,
    size: float,
    generator: torch.Generator,
) -> list[Values]:
    """Of each rank, from earlier steps; all have the mean of the estimates, and one subspace."""
    numel = sum(_numels(parameters))
    columns = _columns(parameters, scheme.rank)
    shared = torch.randn(sum(columns) * scheme.rank, generator=generator) * size
    rows = [
        {
            kind: torch.randn(numel, generator=generator) * size
            for kind in sorted(states_of(scheme) - {"mean_estimate"})
        }
        for _ in range(world)
    ]
    for row in rows:
        if scheme.stochastic:
            row[ROUNDS] = torch.tensor(5)
        if scheme.scheme == "powersgd":
            row[SUBSPACE] = shared.clone()
        if "estimate" in row:
            estimates = torch.stack([other["estimate"].double() for other in rows])
            row["mean_estimate"] = estimates.mean(0).float()
    return rows


def _columns(parameters: Parameters, rank: int) -> list[int]:
    """Of the matrices that become thin."""
    return [math.prod(shape[1:]) for _, shape in parameters if is_thin(shape, rank)]


# What holds of a step


def _specified(done: Exchanged) -> None:
    """There are the states that a scheme needs, of all parameters in their order."""
    parameters = done.parameters
    every = tuple((name, math.prod(shape)) for name, shape in parameters)
    rank = done.scheme.rank
    thin = tuple(
        (name, math.prod(shape[1:]) * rank) for name, shape in parameters if is_thin(shape, rank)
    )
    specs = [one.states(CPU) for one in done.exchanges]
    assert all(row == specs[0] for row in specs)
    assert {spec.kind for spec in specs[0]} == _kinds(done.scheme)
    assert len({spec.kind for spec in specs[0]}) == len(specs[0])
    for spec in specs[0]:
        parts = thin if spec.kind == SUBSPACE else () if spec.kind == ROUNDS else every
        of, *_ = parts or every
        numel = sum(n for _, n in parts)
        assert spec.parameter == of[0] and spec.parts == parts and spec.fill == 0.0
        assert spec.shape == (() if spec.kind == ROUNDS else (numel,))
        assert spec.dtype is (torch.int64 if spec.kind == ROUNDS else torch.float32)
        for new in done.news:
            assert new[spec.kind].shape == spec.shape and new[spec.kind].dtype is spec.dtype


def _sent(done: Exchanged) -> None:
    """As many legs, and bytes on each, as the scheme is to send."""
    names = [row[0].operator for row in done.launches]
    sizes = [row[0].payload.numel() * row[0].payload.element_size() for row in done.launches]
    assert all(len({launch.same_for_all() for launch in row}) == 1 for row in done.launches)
    assert len(names) == done.exchanges[0].legs
    scheme, lengths, world = done.scheme, _numels(done.parameters), done.world
    if scheme.scheme == "powersgd":
        thin = [s for _, s in done.parameters if is_thin(s, scheme.rank)]
        small = [s for _, s in done.parameters if not is_thin(s, scheme.rank)]
        first = sum(s[0] * scheme.rank for s in thin) + sum(map(math.prod, small))
        second = sum(_columns(done.parameters, scheme.rank)) * scheme.rank
        assert names == ["all_reduce"] * 2 and sizes == [4 * first, 4 * second]
        return
    shards = world if world >= TWO_LEGS_FROM else 1
    if scheme.scheme == "topk":
        expected = [TopKLayout(sum(lengths), scheme.ratio).payload_bytes]
    elif scheme.scheme in ("bf16", "fp16"):
        layout = Layout16(sum(lengths), shards, scheme.scheme)
        expected = [layout.payload_bytes, layout.piece_bytes]
    else:
        first_bits = 4 if scheme.scheme == "int4" else 8
        second_bits = scheme.second_bits if first_bits == 4 else 8
        legs = [
            Layout(tuple(lengths), shards, bits, scheme.group, scheme.symmetric, scheme.rotate)
            for bits in (first_bits, second_bits)
        ]
        expected = [legs[0].payload_bytes, legs[1].piece_bytes]
    if scheme.scheme == "topk" or world < TWO_LEGS_FROM:
        assert names == ["all_gather_into_tensor"] and sizes == expected[:1]
    else:
        assert names == ["all_to_all_single", "all_gather_into_tensor"] and sizes == expected
    is_random = {seed is not None for row in done.seeds for seed in row}
    assert is_random <= {scheme.stochastic}
    are_kept = {residual is not None for row in done.residuals for residual in row}
    assert are_kept <= {bool(scheme.feedback)}, "errors are computed that nobody keeps"


def _same_everywhere(done: Exchanged) -> None:
    assert all(bitwise(row, done.means[0]) for row in done.means), "ranks decode other means"
    for kind in {"mean_estimate", SUBSPACE} & _kinds(done.scheme):
        assert all(bitwise(new[kind], done.news[0][kind]) for new in done.news), kind


def _wanted(done: Exchanged) -> torch.Tensor:
    """[ranks, n] fp64: what each rank would send if it could send all."""
    kinds, kept, flats = states_of(done.scheme), done.scheme.momentum, done.flats.double()
    if "estimate" in kinds:
        return _average(done) - done.all("estimate")
    if "velocity" in kinds:
        return kept * done.all("velocity") + flats + done.all("residual")
    return flats + done.all("residual") if "residual" in kinds else flats


def _average(done: Exchanged) -> torch.Tensor:
    kept, flats = done.scheme.momentum, done.flats.double()
    return kept * done.all("velocity") + (1 - kept) * flats if kept else flats


def _arrived(done: Exchanged) -> torch.Tensor:
    """[n] fp64: the mean of what was sent."""
    mean = done.means[0].double()
    return mean - done.all("mean_estimate")[0] if done.scheme.feedback == "ef21" else mean


def _slack(done: Exchanged) -> float:
    """Rounding in fp32, of elements of one bucket, which a rotation mixes."""
    sizes = [done.flats.double(), done.means[:1].double()]
    sizes += [done.all(kind) for kind in states_of(done.scheme)]
    largest = max(float(size.abs().max()) if size.numel() else 0.0 for size in sizes)
    return 8 * (done.world + 4) * EPS * largest


def _conserved(done: Exchanged) -> None:
    """As often as there are ranks what arrived, and what they keep, is what they had; element by element."""
    kinds, wanted, arrived = states_of(done.scheme), _wanted(done), _arrived(done)
    slack = done.world * _slack(done)
    if "residual" in kinds:
        kept = done.all("residual", "news")
        assert ((done.world * arrived + kept.sum(0) - wanted.sum(0)).abs() <= slack).all()
    if "estimate" in kinds:
        moved = done.all("estimate", "news") - done.all("estimate")
        assert ((done.world * arrived - moved.sum(0)).abs() <= slack).all()
        assert bitwise(done.news[0]["mean_estimate"], done.means[0])


def _within_its_bound(done: Exchanged) -> None:
    """What arrives of each parameter is near the mean, and so is what the ranks together keep near nothing."""
    wanted, arrived, slack = _wanted(done), _arrived(done), _slack(done)
    pieces = wanted.split(_numels(done.parameters), dim=1)
    found = arrived.split(_numels(done.parameters))
    for piece, mean in zip(pieces, found, strict=True):
        bound = loss_bound(done.scheme, piece.abs()) + slack
        assert ((piece.mean(0) - mean).abs() <= bound).all(), f"off by more than {bound}"
    if done.exchanges[0].legs == 1:
        _loses_no_more(done)
    if done.scheme.scheme == "topk" and done.world == 1:
        quota = TopKLayout(wanted.shape[1], done.scheme.ratio).quota(0) if wanted.numel() else 0
        assert int((arrived != 0).sum()) <= quota


def _loses_no_more(done: Exchanged) -> None:
    """In one leg, what each rank keeps is what its own encoding loses."""
    kinds, wanted, slack = states_of(done.scheme), _wanted(done), _slack(done)
    if "residual" in kinds:
        lost = done.all("residual", "news")
    elif "estimate" in kinds:
        lost = _average(done) - done.all("estimate", "news")
    else:
        return
    numels = _numels(done.parameters)
    for piece, kept in zip(wanted.split(numels, dim=1), lost.split(numels, dim=1), strict=True):
        for had, rest in zip(piece, kept, strict=True):
            bound = loss_bound(done.scheme, had[None].abs()) + slack
            assert (rest.abs() <= bound).all(), f"a rank loses more than {bound}"


def _velocity(done: Exchanged) -> None:
    """Of an element that was sent it is forgotten, of another it goes on; an average always does."""
    if "velocity" not in states_of(done.scheme):
        return
    new = done.all("velocity", "news")
    if done.scheme.feedback == "ef21":
        assert ((new - _average(done)).abs() <= _slack(done)).all()
        return
    wanted, kept = _wanted(done), done.all("residual", "news")
    moved = wanted - done.all("residual")
    is_sent = kept.abs() <= 2.0**-7 * wanted.abs()
    assert (new[is_sent & (wanted != 0)] == 0).all()
    assert ((new - moved)[~is_sent].abs() <= _slack(done)).all()


def _projected(done: Exchanged) -> None:
    """What arrives of a matrix is the mean, projected onto what it makes of the subspace; the rest arrives."""
    rank, world = done.scheme.rank, done.world
    has_feedback = bool(done.scheme.feedback)
    wanted = _wanted(done)
    numels = _numels(done.parameters)
    rows = zip(
        done.parameters,
        wanted.split(numels, dim=1),
        done.means[0].double().split(numels),
        strict=True,
    )
    kept = done.all("residual", "news").split(numels, dim=1) if has_feedback else None
    sizes = [columns * rank for columns in _columns(done.parameters, rank)]
    olds = iter(done.olds[0][SUBSPACE].double().split(sizes))
    news = iter(done.news[0][SUBSPACE].double().split(sizes))
    for at, ((name, shape), had, found) in enumerate(rows):
        mean = had.mean(0)
        slack = 64 * (world + 4) * EPS * float(had.abs().max() if had.numel() else 0.0)
        is_small = not is_thin(shape, rank)
        if kept is not None:
            lost = torch.zeros_like(had) if is_small else had - found
            assert ((kept[at] - lost).abs() <= slack).all(), f"{name} keeps what has arrived"
        if is_small:
            assert ((found - mean).abs() <= slack).all(), name
            continue
        matrix, mean = found.view(shape[0], -1), mean.view(shape[0], -1)
        old, new = (next(states).view(-1, rank) for states in (olds, news))
        if old.any():
            basis = torch.linalg.qr(mean @ torch.linalg.qr(old).Q).Q
            expected = basis @ basis.t() @ mean
            assert (matrix - expected).norm() <= 1e-3 * mean.norm(), name
        assert torch.linalg.matrix_rank(matrix, rtol=1e-4) <= rank
        assert (matrix - mean).norm() < 0.999 * mean.norm(), f"nothing arrives of {name}"
        angle = torch.dot(matrix.flatten(), (mean - matrix).flatten()) / mean.square().sum()
        assert abs(angle) < 1e-4, f"{name} is not projected"
        # P is orthonormal, so the other factor is as large as the product, and spans its rows.
        assert abs(new.norm() - matrix.norm()) <= 1e-3 * mean.norm()
        onto = torch.linalg.qr(new).Q
        assert (matrix - matrix @ onto @ onto.t()).norm() <= 1e-3 * mean.norm()


def _tells(done: Exchanged, seed: int) -> None:
    """Of a bucket that is not finite on one rank, in any element, every rank hears."""
    if not done.flats.numel():
        return
    for one, mean in zip(done.exchanges, done.means, strict=True):
        assert one.telling(mean).isfinite().all()
    flats = done.flats.clone()
    flats[seed % done.world, seed % flats.shape[1]] = (torch.inf, -torch.inf, torch.nan)[seed % 3]
    worse = exchange(done.scheme, done.parameters, done.exchanges, flats, done.olds)
    for one, mean in zip(worse.exchanges, worse.means, strict=True):
        assert not one.telling(mean).isfinite().all(), "nobody hears of what is not finite"
        assert done.scheme.scheme == "powersgd" or not mean.isfinite().any()
