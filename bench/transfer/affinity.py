"""First-order ways to choose sources, rivals of task modeling: each source is scored alone.

*Pairwise affinity*: how much the target gains from training with one source; for a set, the mean over its members (3.1,
"higher-order approximation"). *Gradient similarity*: the cosine between the gradients of a source's and the target's
loss. Both give a score for each source, higher is better; the best m are taken. Validation samples choose m (B.1), by
the rule that also chooses task modeling's γ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from metaban.models.transfer.nets import NetLosses
from metaban.models.transfer.task_modeling import SubsetLosses, TransferSettings, choose_sources


def pairwise_affinity(losses: SubsetLosses) -> Tensor:
    """f_t(∅) − f_t({i}): [k]."""
    sets = torch.cat([torch.zeros(1, losses.sources), torch.eye(losses.sources)]).bool()  # [1 + k, k]
    values = losses.validation(sets)  # [1 + k]
    return values[0] - values[1:]


def averaged_affinity(score: Tensor, members: Tensor) -> Tensor:
    """Prediction of pairs for sets [n, k]: the mean over members, 0 for the empty set: [n]."""
    sizes = members.sum(1).clamp_min(1)  # [n]
    return members.to(score) @ score / sizes


def gradient_similarity(losses: NetLosses) -> Tensor:
    """Cosines of the encoder's gradients of each source and of the target, at a model of the target alone: [k].

    A source has no head there and takes the target's; with a squared loss, at its own offset, since tasks may differ in
    their means.
    """
    (alone,) = losses.train(torch.zeros(1, losses.sources, dtype=torch.bool, device=losses.tasks.x.device))
    tasks, head = losses.tasks, alone.head[0]  # [h]
    x = pad(tasks.x, (0, 1), value=1.0)  # [T, m, d + 1]
    y = tasks.y.to(x)  # [T, m]
    hidden = torch.relu(x @ alone.encoder[0])  # [T, m, h]
    share = tasks.valid / tasks.counts.unsqueeze(1)  # [T, m]
    outputs = hidden @ head  # [T, m]
    if losses.squares:
        away = outputs - y  # [T, m]
        slope = (away - (away * share).sum(1, keepdim=True)) * share
    else:
        slope = ((outputs + alone.offset).sigmoid() - y) * share
    of_hidden = slope.unsqueeze(-1) * head * (hidden > 0)  # [T, m, h]
    gradients = (x.mT @ of_hidden).flatten(1)  # [T, (d + 1)·h]
    return cosine_similarity(gradients[1:], gradients[:1], dim=1)


def best_first(losses: SubsetLosses, score: Tensor, slack: float = TransferSettings().slack) -> Tensor:
    """The m sources with the highest scores, m from 0 to k by validation: [k]."""
    return choose_sources(losses, -score.double(), slack)[0]
