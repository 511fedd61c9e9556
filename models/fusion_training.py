"""Trains model fusion: gradient steps on the bound, in turn with the permutations of hidden units.

Sources come with their units in any order and scale. They are brought into a common order first (`first_alignment`);
from then on every so many steps each goes where the model expects it most (Eq. 33). All networks and samples of a step
are one tensor; only the assignments, one call each, go network by network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from models.alignment import Density, aligned, contribution_variances, first_alignment
from models.fusion import FusionState
from models.fusion_gp import ProfileProcesses
from models.fusion_modules import Batch, CrossingModule, FusionModules
from models.plain_net import NetShape, rescaled

#: Outputs that vary less than this share of the usual count as if they varied so much.
LEAST_OUTPUT_SCALE = 0.05
#: Gradients longer than this are cut: the bound is steep where variances are small.
CLIP = 100.0
#: What log-likelihoods of parameters count beside those of outputs without hidden units, where both say the same.
HEAD_PARAMETER_WEIGHT = 0.1
#: Least standard deviation of parameters that training reckons with.
LEAST_SCALE = 1e-4


@final
@dataclass(frozen=True, slots=True)
class FusionSettings:
    """How to train; sizes of the published model are in `models/fusion_modules.py`."""

    #: e, and the inducing inputs of each, as far as there are sources.
    processes: int = 10
    inducing: int = 50
    #: Sources and draws of a gradient step.
    batch: int = 128
    samples: int = 2
    #: Adam's highest rate, reached within the first rounds, which falls to none along a cosine. Much higher ones lose
    #: all that depends on the profile in some runs.
    rate: float = 5e-3
    warm_rounds: int = 2
    #: Gradient steps of a round, and rounds.
    round_steps: int = 50
    rounds: int = 30
    #: Rounds between two renewals of the permutations.
    realign_rounds: int = 5
    #: Whether hidden units are aligned.
    align: bool = True
    #: Whether what the networks say of the inputs counts beside their parameters, if there are inputs.
    outputs: bool = True
    #: Rounds of the first alignment: to means of all, to means of like profiles.
    first_rounds: tuple[int, int] = (3, 5)
    #: Least variance of a parameter in shares of its variance over the sources.
    least_variance: float = 0.05
    #: What log-likelihoods of parameters count where those of outputs count too, with very many sources and with hidden
    #: units: how sources compute something shows what they share only as far as many agree on it.
    parameter_weight: float = 9.0
    #: With so many sources half of it. The odd ways of few are learned by heart.
    half_weight_sources: int = 400
    #: Half of the sources of a step are moved towards one of so many sources with the nearest profiles.
    vicinity: int = 3

    def share_of_rate(self, step: int) -> float:
        """How much of `rate` a gradient step takes."""
        rise = (step + 1) / (1 + self.warm_rounds * self.round_steps)
        return min(1.0, rise) * 0.5 * (1 + math.cos(math.pi * step / (self.rounds * self.round_steps)))


@final
@dataclass(frozen=True, slots=True)
class FusionFit:
    """What training gives."""

    state: FusionState
    #: The bound a source, after each round.
    bounds: list[float]
    #: The sources in the common order: what to regress on, or to compare with.
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

    Inputs [N, …] such as the networks usually see let what they compute count beside how (N of a few dozen is
    enough); weights [n] say how much each source is to be trusted; progress is told the share done, at most.
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
    batch = Batch(standard, ordered, trust, outputs, None if outputs is None else _spreads(outputs))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # torch's layers draw from the global generator
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
    """How much the outputs of each network vary, at least a share of the usual: [n, N, o] → [n]."""
    spreads = (outputs - outputs.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
    return spreads.clamp_min(LEAST_OUTPUT_SCALE * spreads.mean().clamp_min(1e-6))


def _modules(batch: Batch, shape: NetShape, settings: FusionSettings, generator: torch.Generator) -> FusionModules:
    count = min(settings.inducing, len(batch.profiles))
    # Each process its own part of the sources to begin with.
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


def _parameter_weight(shape: NetShape, batch: Batch, settings: FusionSettings) -> float:
    """λ of the bound."""
    if batch.outputs is None:
        return 1.0
    if len(shape.sizes) == 1:
        return HEAD_PARAMETER_WEIGHT
    return settings.parameter_weight * len(batch.nets) / (len(batch.nets) + settings.half_weight_sources)


def _train(
    modules: FusionModules,
    batch: Batch,
    settings: FusionSettings,
    generator: torch.Generator,
    inputs: Tensor | None,
    progress: Callable[[float], None] | None,
) -> tuple[list[float], Tensor]:
    """All rounds; returns the bounds and the networks as last aligned."""
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
    """The sources with the nearest profiles, without oneself: [n, count]."""
    distances = torch.cdist(profiles, profiles).fill_diagonal_(torch.inf)
    return distances.topk(min(count, len(profiles) - 1), dim=1, largest=False).indices


def _vicinity(batch: Batch, rows: Tensor, near: Tensor, generator: torch.Generator) -> Batch:
    """Some sources, half of them somewhere on the way to a neighbour.

    The bound is a sum over sources and says nothing about the profiles between them, where a flexible model can do as
    it likes: with few sources it learns each by heart. Between two near ones it has to be between them (vicinal risk,
    Chapelle et al., 2000).
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
    modules: FusionModules, batch: Batch, contributions: Tensor, samples: int, generator: torch.Generator
) -> Batch:
    """Every source where its expected log-density under the model's means is highest."""
    means, _ = modules.draw(batch.profiles, samples, generator)
    density = Density.expected(means, contributions)
    nets = aligned(modules.shape, batch.nets, density)
    return Batch(batch.profiles, nets, batch.weights, batch.outputs, batch.output_scale)
