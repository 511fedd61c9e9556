"""First-order ways to choose sources, which task modeling is compared with: what each source does by itself.

*Pairwise affinity*: how much the target gains from training with one source; of a set the mean over its members (3.1,
"higher-order approximation"). *Gradient similarity*: the cosine between the gradients of a source's and the target's
loss. Either gives a score for each source, more is better, and the best m are taken; m is the one whose set loses least
on validation samples, of all from none to all (B.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from models.transfer import SubsetLosses
from models.transfer_nets import NetLosses


def pairwise_affinity(losses: SubsetLosses) -> Tensor:
    """f_t(∅) − f_t({i}): [k]."""
    sets = torch.cat([torch.zeros(1, losses.sources), torch.eye(losses.sources)]).bool()  # [1 + k, k]
    values = losses.validation(sets)  # [1 + k]
    return values[0] - values[1:]


def averaged_affinity(score: Tensor, members: Tensor) -> Tensor:
    """What pairs foretell of sets [n, k]: the mean over members, 0 of nobody: [n]."""
    sizes = members.sum(1).clamp_min(1)  # [n]
    return members.to(score) @ score / sizes


def gradient_similarity(losses: NetLosses) -> Tensor:
    """Cosines of the encoder's gradients by each source and by the target, at a model of the target alone: [k].

    A source has no head there, and takes the target's; with squares for a loss, at its own offset, since tasks may
    differ in their means.
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


def best_first(losses: SubsetLosses, score: Tensor) -> Tensor:
    """The m sources with the highest scores, m from 0 to k by validation: [k]."""
    ranks = score.argsort(descending=True).argsort()  # [k]
    sets = ranks < torch.arange(losses.sources + 1, device=score.device).unsqueeze(1)  # [k + 1, k]
    return sets[losses.validation(sets).argmin()]
