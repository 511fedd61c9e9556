"""The one thread that the tensors of a namespace live on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar, final

from service.errors import Unavailable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@final
class TensorThread(ThreadPoolExecutor):
    """Does one thing at a time; when it was shut down, whoever comes late is told so in a way that a client can be."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="tensors")

    def submit(
        self, work: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Have something done; Unavailable after the end."""
        try:
            return super().submit(work, *args, **kwargs)
        except RuntimeError as error:
            raise Unavailable("The namespace was closed while the request was under way; try again.") from error
