"""Looking after jobs of every kind until they have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar, final

from service.client_core import Call, Pause, Policy, Steps
from service.client_errors import JobFailed

#: Pauses between two looks at a job: the first and the longest.
FIRST_LOOK_S: Final = 0.05
LAST_LOOK_S: Final = 2.0


class AnyJob(Protocol):
    """A job of any kind: `done`, `failed`, or neither yet."""

    @property
    def id(self) -> str:
        """What it is asked after by."""

    @property
    def state(self) -> str:
        """How it is."""


Looked = TypeVar("Looked", bound=AnyJob)


@final
@dataclass(frozen=True, slots=True)
class JobWatch(Generic[Looked]):
    """Looks after a job until it has ended."""

    look: Call[Looked]
    #: Why it failed.
    why: Callable[[Looked], str | None]
    on_progress: Callable[[Looked], None] | None
    timeout_s: float

    def steps(self, policy: Policy) -> Steps[Looked]:
        """Ask, with growing pauses."""
        deadline, pause_s = policy.clock() + self.timeout_s, FIRST_LOOK_S
        while True:
            job = yield from self.look.steps(policy)
            if self.on_progress is not None:
                self.on_progress(job)
            if job.state == "done":
                return job
            if job.state == "failed":
                raise JobFailed(self.why(job) or "the service did not say why", job_id=job.id)
            if policy.clock() + pause_s >= deadline:
                raise JobFailed(f"not done after {self.timeout_s:g} s; it goes on", job_id=job.id)
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)
