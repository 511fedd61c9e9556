"""One run of a fault: its time limit, its random generator and its results."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from tests.chaos.clients import Load, SentEvents
from tests.chaos.deployment import AppendFsync, Deployment
from tests.chaos.fork_server import ForkServer
from tests.chaos.store_audit import Findings, audit


@final
@dataclass
class Row:
    """The results of a fault."""

    fault: str
    kills: int = 0
    accepted: int = 0
    applied: int = 0
    duplicates: int = 0
    lost: int = 0
    twice: int = 0
    valid_dead_letters: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: Folders with logs and data, kept when an invariant is violated.
    kept: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.problems or self.lost or self.twice or self.valid_dead_letters)

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "BROKEN"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@final
class Run:
    """Passed to a fault: deployments, clients, time and checks."""

    def __init__(self, fault: str, fork_server: ForkServer, *, seconds: float, seed: int, timed: bool = False) -> None:
        """`timed`: check time limits too; a machine busy with other tests may miss them."""
        self._timed = timed
        self.rng = random.Random(f"{fault}:{seed}")
        self.seconds = seconds
        self.row = Row(fault)
        self._fork_server = fork_server
        self._started = time.monotonic()
        self._deadline: float | None = None

    def going(self) -> bool:
        """Whether there is time left; the time starts with the first call."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.seconds
        return time.monotonic() < self._deadline

    @contextmanager
    def deployment(
        self,
        *,
        servers: int = 1,
        workers: int = 1,
        appendfsync: AppendFsync = "always",
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Deployment]:
        """A deployment for the fault; its logs and data are kept when an invariant is violated."""
        deployment = Deployment(
            self._fork_server, servers=servers, workers=workers, appendfsync=appendfsync, settings=settings
        )
        try:
            with deployment:
                yield deployment
                self.row.kills += deployment.kills
                deployment.keep_files = not self.row.holds
        finally:
            if deployment.keep_files:
                self.row.kept.append(str(deployment.folder))

    @contextmanager
    def load(self, deployment: Deployment, sent: SentEvents, **options: Any) -> Iterator[Load]:
        """Clients that send requests during the fault and finish after it."""
        load = Load(sent, deployment.urls, self.rng, **options)
        load.start()
        try:
            yield load
        finally:
            load.stop()

    def audit_store(self, deployment: Deployment, sent: SentEvents, **options: Any) -> Findings:
        """Audit the store and add the result to the row."""
        findings = audit(deployment.valkey.client, sent, **options)
        row = self.row
        row.accepted += findings.acknowledged
        row.applied += findings.applied
        row.duplicates += sent.duplicates_refused
        row.lost += findings.lost
        row.twice += findings.twice
        row.valid_dead_letters += findings.valid_dead_letters
        row.problems += findings.problems
        return findings

    def note(self, text: str) -> None:
        self.row.notes.append(text)

    def expect(self, holds: object, problem: str) -> None:
        """Check an invariant of this fault."""
        if not holds:
            self.row.problems.append(problem)

    def aim(self, times_s: Sequence[float], most_s: float, what: str) -> None:
        """Record durations and their limit."""
        self.note(f"{what} after {', '.join(f'{took:.1f}' for took in times_s)} s")
        if max(times_s) > most_s:
            missed = f"{what} after {max(times_s):.1f} s, not within {most_s:g} s"
            if self._timed:
                self.expect(False, missed)
            else:
                self.note(missed)

    def finish(self, work: Callable[[Run], None]) -> Row:
        """Run the fault; an exception is a violated invariant too."""
        try:
            work(self)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.row.problems.append(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
        self.row.seconds = time.monotonic() - self._started
        return self.row
