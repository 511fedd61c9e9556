"""Small networks with samples, and their dense autograd matrices, one task at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as Coin
from torch.distributions import Normal
from torch.func import jacrev  # type: ignore[attr-defined]

from metaban.models.bayes.curvature import Structure
from metaban.models.bayes.laplace import BernoulliOutputs, GaussianOutputs, OutputLikelihood, TaskBatch
from metaban.models.numerics.bias_free_net import Shape
from metaban.models.numerics.dense_net import NetShape


def plain_shape(shape: Shape) -> NetShape:
    """A `bias_free_net` network as a `dense_net` shape: the same flat vector, the same function."""
    return NetShape((shape.inputs, *[shape.width] * (shape.depth - 1), 1), offsets=False)


SHAPES = [
    NetShape((2, 4, 1)),
    NetShape((2, 3, 4, 2)),
    NetShape((3, 5, 1), offsets=False),
    NetShape((3, 1)),
    plain_shape(Shape(2, 3, 4)),
]
STRUCTURES: list[Structure] = ["full", "diagonal", "last-layer", "kronecker"]
LIKELIHOODS = [GaussianOutputs(torch.tensor(0.3, dtype=torch.float64)), BernoulliOutputs()]
DAMPING = torch.tensor(0.7, dtype=torch.float64)
TASKS, SAMPLES = 3, 6

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.widths)))
by_structure = pytest.mark.parametrize("structure", STRUCTURES)
by_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=["gaussian", "bernoulli"])


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def world(shape: NetShape, seed: int = 0) -> tuple[Tensor, TaskBatch]:
    """Networks of three tasks with samples; the second and third task have fewer."""
    inputs, outputs = shape.widths[0], shape.widths[-1]
    weight = torch.ones(TASKS, SAMPLES, dtype=torch.float64)
    weight[1, 4:] = 0
    weight[2, 1:] = 0
    targets = (drawn(TASKS, SAMPLES, outputs, seed=seed + 1) > 0).double()
    return drawn(TASKS, shape.parameters, seed=seed + 2), TaskBatch(
        drawn(TASKS, SAMPLES, inputs, seed=seed + 3), targets, weight
    )


def net_outputs(shape: NetShape, net: Tensor, x: Tensor) -> Tensor:
    """Outputs [S, C] of one network, by `dense_net`."""
    return shape.outputs(net, x)


def task_loss(shape: NetShape, batch: TaskBatch, task: int, likelihood: OutputLikelihood) -> Callable[[Tensor], Tensor]:
    """−log p of one task's samples by torch's own distributions, as a function of one network."""

    def value(net: Tensor) -> Tensor:
        outputs, targets = net_outputs(shape, net, batch.x[task]), batch.targets[task]
        if isinstance(likelihood, GaussianOutputs):
            chance = Normal(outputs, likelihood.noise.sqrt()).log_prob(targets)
        else:
            chance = Coin(logits=outputs).log_prob(targets)
        return -(chance * batch.weight[task, :, None]).sum()

    return value


def layer_positions(shape: NetShape) -> list[Tensor]:
    """Positions of each layer's matrix [o, k], biases last, in the flat vector."""
    return [layer.long() for layer in shape.layers(torch.arange(shape.parameters, dtype=torch.float64))]


def layer_derivatives(shape: NetShape, net: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For one input x [d], of each layer: δ [C, o] by autograd of a shift of its outputs, and its inputs [k]."""
    layers, given = shape.layers(net), []

    def shifted(shifts: list[Tensor], keep: bool = False) -> Tensor:
        hidden = x
        for place, (layer, shift) in enumerate(zip(layers, shifts, strict=True)):
            hidden = torch.relu(hidden) if place else hidden
            hidden = torch.cat([hidden, torch.ones(1, dtype=x.dtype)]) if shape.offsets else hidden
            if keep:
                given.append(hidden)
            hidden = layer @ hidden + shift
        return hidden

    nothing = [torch.zeros(rows, dtype=x.dtype) for rows, _ in shape.sizes]
    shifted(nothing, keep=True)
    return list(zip(jacrev(shifted)(nothing), given, strict=True))


def dense(
    shape: NetShape,
    net: Tensor,
    batch: TaskBatch,
    task: int,
    likelihood: OutputLikelihood,
    kind: Structure,
    damping: Tensor = DAMPING,
) -> Tensor:
    """H of one task over all parameters; parameters that a structure leaves out have an infinite diagonal."""
    x, weight = batch.x[task], batch.weight[task]
    samples = [index for index in range(len(x)) if weight[index] > 0]
    prior = torch.zeros(shape.parameters, dtype=torch.float64)
    for at, tau in zip(layer_positions(shape), damping.expand(len(shape.sizes)), strict=True):
        prior[at.flatten()] = tau
    outputs = net_outputs(shape, net.detach(), x).requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.loss(outputs, batch.targets[task]).sum(), outputs, create_graph=True)
    bend = torch.autograd.grad(slope.sum(), outputs)[0] if slope.requires_grad else 0 * slope  # [S, C]
    bends = [bend[index].diag() for index in samples]
    if kind == "kronecker":
        result = prior.diag()
        parts = [layer_derivatives(shape, net, x[index]) for index in samples]
        shares = torch.stack([bend.trace() for bend in bends])
        for layer, at in enumerate(layer_positions(shape)):
            inputs = sum(
                share * torch.outer(part[layer][1], part[layer][1])
                for share, part in zip(shares / shares.sum(), parts, strict=True)
            )
            pulls = sum(part[layer][0].T @ bend @ part[layer][0] for bend, part in zip(bends, parts, strict=True))
            result[at.flatten()[:, None], at.flatten()] += torch.kron(torch.as_tensor(pulls), torch.as_tensor(inputs))
        return result
    jacobian = jacrev(lambda point: net_outputs(shape, point, x))(net)  # [S, C, p]
    total = prior.diag()
    for index, bend in zip(samples, bends, strict=True):
        total = total + jacobian[index].T @ bend @ jacobian[index]
    if kind == "full":
        return total
    if kind == "diagonal":
        return total.diagonal().diag()
    last = layer_positions(shape)[-1].flatten()
    result = torch.full_like(total.diagonal(), torch.inf).diag()
    result[last[:, None], last] = total[last[:, None], last]
    return result


def dense_inverse(matrix: Tensor) -> Tensor:
    """H⁻¹, 0 where H is infinite."""
    known = torch.nonzero(matrix.diagonal().isfinite())[:, 0]
    result = torch.zeros_like(matrix)
    result[known[:, None], known] = torch.linalg.inv(matrix[known[:, None], known])
    return result


def dense_log_det(matrix: Tensor) -> Tensor:
    known = torch.nonzero(matrix.diagonal().isfinite())[:, 0]
    return torch.linalg.slogdet(matrix[known[:, None], known])[1]
