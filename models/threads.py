"""How many threads numerical libraries use: they do not ask each other, and small work is slower on many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


def use_threads(count: int) -> None:
    """So many threads for tensors and arrays, from now on."""
    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors and arrays on one thread, as the service ships; as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(threads)
