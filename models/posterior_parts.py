"""What the default learner's mean of an arm is made of.

The mean is wᵀh(x) of the user's head w on h = [1, x, x⊗x, p(x)], plus what the memory adds. The head's constant is the
intercept. Everything else of wᵀh, the trunk's p included, is split by gradient × input, with what was on offer held
fixed where it is taken out of inputs: as if the arm were one of very many. The memory stands apart as a whole: it tells
near-identical arms from all others, so that its gradient is 0 nearly everywhere and huge in between.
"""

from __future__ import annotations

from typing import Any

from models.arrays import Array, zeros
from models.explaining import Contributions, through_layers, through_products, through_standardizing
from models.inputs import ArmInputs
from models.judging import remember
from models.learner import Query
from models.settings import PosteriorSettings
from models.slates import Slates


def posterior_contributions(
    settings: PosteriorSettings,
    inputs: ArmInputs,
    outline: Any,
    query: Query,
    rows: Array,
    z: Array,
    predicted: Array,
) -> Contributions:
    """Of n arms of one request: their rows, standardised inputs z [n, d] and the trunk's predictions [n]."""
    raw, own, nothing = query.arms[rows], query.own, zeros((rows.shape[0],), z)
    gradient = zeros(z.shape, z)  # ∂mean/∂z
    if settings.trunk:
        ramps = outline["ramps"]
        delta = through_layers(outline["layers"], ramps.values(z) if ramps else z, own["asked"])
        gradient = ramps.gradient(z, delta) if ramps else delta
    if not settings.heads:
        gradient = through_standardizing(gradient, z, outline["scale"])
        return Contributions.of(gradient, raw, intercept=nothing, memory=nothing)
    head, seen = own["heads"][0, :, -1], inputs.seen  # [D]
    known = inputs.heads(outline, z, predicted)[:, : 1 + seen]  # [n, 1 + c]
    x = known[:, 1:]
    by_head = zeros(x.shape, x) + head[1 : 1 + seen]
    if inputs.products:
        by_head = by_head + through_products(x, head[1 + seen : -1])
    gradient = gradient * head[-1] + (by_head @ outline["directions"].mT if inputs.narrowed else by_head)
    memory = nothing
    if settings.memory:
        memory, _ = remember(known, Slates([rows.shape[0]]), own, outline["gain"], settings.memory_radius)
    gradient = through_standardizing(gradient, z, outline["scale"])
    return Contributions.of(gradient, raw, intercept=nothing + head[0], memory=memory)
