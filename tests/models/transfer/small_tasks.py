"""Small transfer tasks and their networks."""

from __future__ import annotations

import torch
from torch import Tensor

from metaban.models.transfer.nets import NetLosses, NetSettings, TaskTensors

SMALL = NetSettings(hidden=5, steps=9, batch=3, rate=0.05, decay=0.1)


def some_tasks(
    count: int = 7, longest: int = 30, inputs: int = 3, *, classes: bool = False, seed: int = 0
) -> TaskTensors:
    """The first task is the target; the second half of the others is unrelated to it. Some have fewer samples."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, longest, inputs), generator=generator)
    vector, noise = torch.randn(inputs, generator=generator), torch.randn((count, longest), generator=generator)
    y = torch.where(torch.arange(count).unsqueeze(1) <= count // 2, (x @ vector) ** 2 + 0.1 * noise, 3 * noise)
    if classes:
        y = (y > y.median()).float()
    valid = torch.arange(longest) < (longest - 2 * torch.arange(count)).unsqueeze(1)
    return TaskTensors(x, y, valid, torch.randint(0, 3, (count, longest), generator=generator))


def losses_of(metric: str = "mse", settings: NetSettings = SMALL, **kwargs: int) -> NetLosses:
    tasks = some_tasks(classes=metric != "mse", **kwargs)
    return NetLosses.from_tasks(tasks, 0, metric, seed=3, settings=settings)


def mixed_sets(sources: int, count: int) -> Tensor:
    members = torch.rand(count, sources, generator=torch.Generator().manual_seed(1)) < 0.5
    members[0], members[3] = False, True
    return members
