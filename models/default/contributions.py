"""Attribution of the default learner's mean.

The mean is wᵀh(x) of the user's head w on h = [1, x, x⊗x, p(x), q_i], plus the arm's effect b_i, the shared βᵀz of wide
inputs, and the memory's correction. The head's constant is the intercept. The rest of wᵀh and βᵀz, the trunk's p
included, are attributed by gradient × input with the slate summary fixed. The memory is one separate part: its kernel
is so narrow that its gradient is 0 almost everywhere. What is known of the arm by its id belongs to no input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metaban.models.default.inputs import ArmInputs
from metaban.models.default.scoring import join_members, memory_correction, split_members
from metaban.models.explaining import Contributions, through_standardizing
from metaban.models.learner import Query
from metaban.models.numerics.arrays import Array, rectified, zeros
from metaban.models.numerics.slates import Slates
from metaban.models.settings import PosteriorSettings


def posterior_contributions(
    settings: PosteriorSettings,
    inputs: ArmInputs,
    outline: Any,
    query: Query,
    rows: Array,
    z: Array,
    predicted: Array,
) -> Contributions:
    """Attribution of n arms of one request: rows, standardised inputs z [n, d] and the trunk's predictions [n]."""
    raw, own, nothing = query.arms[rows], query.own, zeros((rows.shape[0],), z)
    gradient = zeros(z.shape, z)  # ∂mean/∂z
    if inputs.trunk:
        ramps = outline["ramps"]
        delta = through_layers(outline["layers"], ramps.values(z) if ramps else z, own["user_offset"])
        gradient = ramps.gradient(z, delta) if ramps else delta
    if not settings.heads:
        gradient = through_standardizing(gradient, z, outline["scale"])
        return Contributions.of(gradient, raw, intercept=nothing, memory=nothing)
    head, seen = own["heads"][0, :, -1], inputs.seen  # [D]
    known = inputs.head_inputs(outline, z, predicted)[:, : 1 + seen]  # [n, 1 + c]
    x = known[:, 1:]
    by_head = zeros(x.shape, x) + head[1 : 1 + seen]
    if inputs.products:
        by_head = by_head + through_products(x, head[1 + seen : inputs.trunk_column])
    gradient = gradient * head[inputs.trunk_column]
    gradient[:, : inputs.head_inputs_count] += by_head @ outline["directions"].mT if inputs.narrowed else by_head
    if inputs.wide and settings.arms:
        gradient += outline["wide_weights"]
    memory = nothing
    if settings.memory:
        memory, _ = memory_correction(known, Slates([rows.shape[0]]), own, outline["gain"], settings.memory_radius)
    gradient = through_standardizing(gradient, z, outline["scale"])
    return Contributions.of(gradient, raw, intercept=nothing + head[0], memory=memory)


def through_products(x: Array, weight: Array) -> Array:
    """Gradient [n, c] of Σ weight · `pair_products(x)`: x [n, c], weight [c(c+1)/2]."""
    gradient, start = zeros(x.shape, x), 0
    for i in range(x.shape[-1]):  # few: heads have few inputs when products are on
        row = weight[start : start + x.shape[-1] - i]  # of x_i·x_i, x_i·x_{i+1}, …
        gradient[:, i] += x[:, i:] @ row
        gradient[:, i:] += row * x[:, i : i + 1]
        start += x.shape[-1] - i
    return gradient


def through_layers(layers: Sequence[tuple[Array, Array]], x: Array, user_offset: Array) -> Array:
    """Gradient [n, inputs] of `judging.trunk_prediction`, with the same arguments."""
    (first, _), *hidden, (last, _) = layers
    y, active = x @ first + user_offset, []
    for weight, offset in hidden:
        active.append(y > 0)
        y = join_members(split_members(rectified(y), weight) @ weight) + offset
    delta = last * (y > 0)  # [n, M·m]
    for (weight, _), alive in zip(reversed(hidden), reversed(active), strict=True):
        delta = join_members(split_members(delta, weight) @ weight.mT) * alive
    return delta @ first.mT
