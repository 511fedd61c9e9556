"""Where tensors are computed: the device, and the number of threads of torch and BLAS.

No other module names a device. Small operations are slower on many threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from threadpoolctl import threadpool_limits


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The requested device; `auto` is a GPU if there is one."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError(
            "METABAN_DEVICE=cuda, but torch finds no GPU: use auto or cpu, or install a CUDA build of torch"
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def use_threads(count: int) -> None:
    """Use this many threads for tensors and arrays from now on."""
    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run tensors and arrays on one thread, the service's default, and restore the setting afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)
