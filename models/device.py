"""Where tensors live; the only place that names a device."""

from __future__ import annotations

from typing import Literal

import torch


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device asked for; `auto` takes a GPU when there is one."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError(
            "METABAN_DEVICE=cuda, but torch finds no GPU: use auto or cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")
