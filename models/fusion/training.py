"""Training of model fusion: gradient steps on the bound, alternating with permutations of hidden units.

Sources are first brought into a common order of units (`first_alignment`); during training each is realigned
periodically to its expected density under the model (Eq. 33). A step is one tensor computation over all networks and
samples; only the assignments are solved network by network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from metaban.models.fusion.alignment import Density, aligned, contribution_variances, first_alignment
from metaban.models.fusion.gp import ProfileProcesses
from metaban.models.fusion.model import FusionState
from metaban.models.fusion.modules import CrossingModule, FusionModules, SourceBatch
from metaban.models.numerics.dense_net import NetShape, rescaled

#: Least variation of outputs, as a share of the mean over networks.
LEAST_OUTPUT_SCALE = 0.05

#: Largest norm of a gradient: the bound is steep where variances are small.
CLIP = 100.0

#: Weight λ of the parameters' likelihoods for networks without hidden units, whose outputs carry the same information.
HEAD_PARAMETER_WEIGHT = 0.1

#: Least standard deviation of parameters.
LEAST_SCALE = 1e-4


@final
@dataclass(frozen=True, slots=True)
class FusionSettings:
    """Training settings; the published model's sizes are in `modules.py`."""

    #: e, and the number of inducing inputs of each, at most the number of sources.
    processes: int = 10
    inducing: int = 50
    #: Sources and draws per gradient step.
    batch: int = 128
    samples: int = 2
    #: Adam's peak rate, reached after `warm_rounds`, then a cosine decay to 0. Much higher rates lose the dependence on
    #: the profile in some runs.
    rate: float = 5e-3
    warm_rounds: int = 2
    #: Gradient steps per round, and rounds.
    round_steps: int = 50
    rounds: int = 30
    #: Rounds between two alignments.
    realign_rounds: int = 5
    #: Whether hidden units are aligned.
    align: bool = True
    #: Whether the networks' outputs at the inputs count beside their parameters, if there are inputs.
    outputs: bool = True
    #: Rounds of the first alignment: to means of all networks, and to means of networks with similar profiles.
    first_rounds: tuple[int, int] = (3, 5)
    #: Least variance of a parameter, relative to its variance over the sources.
    least_variance: float = 0.05
    #: λ with very many sources, if outputs are used and there are hidden units: parameters show what sources share only
    #: if many agree.
    parameter_weight: float = 9.0
    #: Number of sources at which λ is half of it, against overfitting to few.
    half_weight_sources: int = 400
    #: Half of the sources of a step are interpolated towards one of this many nearest sources.
    vicinity: int = 3

    def share_of_rate(self, step: int) -> float:
        """The share of `rate` at a gradient step."""
        rise = (step + 1) / (1 + self.warm_rounds * self.round_steps)
        return min(1.0, rise) * 0.5 * (1 + math.cos(math.pi * step / (self.rounds * self.round_steps)))


@final
@dataclass(frozen=True, slots=True)
class FusionFit:
    """Result of training."""

    state: FusionState
    #: The bound per source, after each round.
    bounds: list[float]
    #: The sources in the common order.
    nets: Tensor


def fit_fusion(
    profiles: Tensor,
    nets: Tensor,
    shape: NetShape,
    settings: FusionSettings | None = None,
    *,
    seed: int,
    inputs: Tensor | None = None,
    weights: Tensor | None = None,
    progress: Callable[[float], None] | None = None,
) -> FusionFit:
    """Learn profile → network from sources: profiles [n, d], nets [n, p].

    `inputs` [N, …], typical inputs of the networks, let their outputs count beside their parameters (a few dozen are
    enough); weights [n] of the sources; `progress` is called with the share done.
    """
    settings = settings or FusionSettings()
    _check(profiles, nets, shape, inputs, weights)
    generator = torch.Generator(nets.device).manual_seed(seed)
    centre, scale = profiles.mean(0), profiles.std(0)
    scale = torch.where(scale > 1e-6 * (1 + centre.abs()), scale, 1.0)
    standard = (profiles - centre) / scale
    ordered = rescaled(shape, nets)
    if settings.align:
        ordered = first_alignment(shape, ordered, standard, inputs, settings.first_rounds)
    outputs = shape.outputs(nets, inputs) if inputs is not None and settings.outputs else None
    trust = torch.ones_like(nets[:, 0]) if weights is None else weights / weights.mean()
    batch = SourceBatch(standard, ordered, trust, outputs, None if outputs is None else _spreads(outputs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # torch's layers use the global generator
        modules = _modules(batch, shape, settings, generator)
    bounds, ordered = _train(modules, batch, settings, generator, inputs, progress)
    kept = {"profile_centre": centre, "profile_scale": scale}
    tensors = {name: tensor.detach().clone() for name, tensor in (kept | modules.tensors()).items()}
    return FusionFit(FusionState.from_dict(FusionState(shape, tensors).to_dict()), bounds, ordered)


def _check(profiles: Tensor, nets: Tensor, shape: NetShape, inputs: Tensor | None, weights: Tensor | None) -> None:
    if len(nets) < 2 or nets.shape != (len(profiles), shape.parameters) or profiles.dim() != 2:
        raise ValueError(f"fusion needs at least two sources, each a profile and {shape.parameters} parameters")
    if inputs is not None and (inputs.dim() != 2 or inputs.shape[1] != shape.widths[0]):
        raise ValueError(f"inputs must be a matrix with {shape.widths[0]} columns")
    if weights is not None and (weights.shape != nets.shape[:1] or not bool((weights > 0).all())):
        raise ValueError("weights must be positive, one for each source")
    if not all(bool(given.isfinite().all()) for given in (profiles, nets, inputs, weights) if given is not None):
        raise ValueError("sources of a fusion must be finite")


def _spreads(outputs: Tensor) -> Tensor:
    """Variation of each network's outputs, with a lower bound: [n, N, o] → [n]."""
    spreads = (outputs - outputs.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
    return spreads.clamp_min(LEAST_OUTPUT_SCALE * spreads.mean().clamp_min(1e-6))


def _modules(
    batch: SourceBatch, shape: NetShape, settings: FusionSettings, generator: torch.Generator
) -> FusionModules:
    count = min(settings.inducing, len(batch.profiles))
    # Each process starts with its own subset of the sources.
    rows = torch.stack(
        [
            torch.randperm(len(batch.profiles), generator=generator, device=generator.device)[:count]
            for _ in range(settings.processes)
        ]
    )
    processes = ProfileProcesses(batch.profiles[rows], generator)
    kinds = shape.kinds().to(batch.nets.device)
    counts = torch.bincount(kinds)
    variances = torch.zeros_like(counts, dtype=batch.nets.dtype).index_add(0, kinds, batch.nets.var(0)) / counts
    scale = variances.sqrt().clamp_min(LEAST_SCALE)[kinds]
    crossing = CrossingModule(batch.nets.mean(0), scale, kinds, settings.least_variance)
    weight = _parameter_weight(shape, batch, settings)
    return FusionModules(shape, processes, crossing, weight).to(batch.nets)


def _parameter_weight(shape: NetShape, batch: SourceBatch, settings: FusionSettings) -> float:
    """λ of the bound."""
    if batch.outputs is None:
        return 1.0
    if len(shape.sizes) == 1:
        return HEAD_PARAMETER_WEIGHT
    return settings.parameter_weight * len(batch.nets) / (len(batch.nets) + settings.half_weight_sources)


def _train(
    modules: FusionModules,
    batch: SourceBatch,
    settings: FusionSettings,
    generator: torch.Generator,
    inputs: Tensor | None,
    progress: Callable[[float], None] | None,
) -> tuple[list[float], Tensor]:
    """All rounds; returns the bounds and the networks in their last order."""
    optimiser = torch.optim.Adam(modules.parameters(), lr=settings.rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, settings.share_of_rate)
    aligns = settings.align and len(modules.shape.sizes) > 1
    sources, total = len(batch.nets), float(batch.weights.sum())
    size = min(settings.batch, sources)
    contributions = contribution_variances(modules.shape, batch.nets, inputs)
    near = _neighbours(batch.profiles, settings.vicinity)
    bounds: list[float] = []
    for done in range(1, settings.rounds + 1):
        found = torch.zeros((), device=batch.nets.device)
        for _ in range(settings.round_steps):
            rows = torch.randperm(sources, generator=generator, device=generator.device)[:size]
            bound = (
                modules.bound(_vicinity(batch, rows, near, generator), total, settings.samples, generator, inputs)
                / total
            )
            optimiser.zero_grad(set_to_none=True)
            (-bound).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(modules.parameters(), CLIP)
            optimiser.step()
            schedule.step()
            found += bound.detach() / settings.round_steps
        bounds.append(float(found))
        if aligns and done % settings.realign_rounds == 0 and done < settings.rounds:
            batch = _realigned(modules, batch, contributions, settings.samples, generator)
        if progress is not None:
            progress(done / settings.rounds)
    modules.eval()
    return bounds, batch.nets


def _neighbours(profiles: Tensor, count: int) -> Tensor:
    """The sources with the nearest profiles: [n, count]."""
    distances = torch.cdist(profiles, profiles).fill_diagonal_(torch.inf)
    return distances.topk(min(count, len(profiles) - 1), dim=1, largest=False).indices


def _vicinity(batch: SourceBatch, rows: Tensor, near: Tensor, generator: torch.Generator) -> SourceBatch:
    """A batch of sources, half of them interpolated towards a neighbour.

    The bound is a sum over sources and does not constrain the model between their profiles, so that few sources are
    overfitted; interpolation does (vicinal risk minimisation, Chapelle et al., 2000).
    """
    chosen = batch.rows(rows)
    if not near.shape[1]:
        return chosen
    place = torch.randint(near.shape[1], (len(rows), 1), generator=generator, device=generator.device)
    other = batch.rows(torch.take_along_dim(near[rows], place, 1).squeeze(1))
    drawn = torch.rand(len(rows), generator=generator, device=generator.device)
    return chosen.between(other, (2 * drawn).clamp_max(1).to(batch.nets))


@torch.no_grad()
def _realigned(
    modules: FusionModules, batch: SourceBatch, contributions: Tensor, samples: int, generator: torch.Generator
) -> SourceBatch:
    """Every source in the order of its highest expected log-density under the model's means (Eq. 33)."""
    means, _ = modules.draw(batch.profiles, samples, generator)
    density = Density.expected(means, contributions)
    nets = aligned(modules.shape, batch.nets, density)
    return SourceBatch(batch.profiles, nets, batch.weights, batch.outputs, batch.output_scale)
