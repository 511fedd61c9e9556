"""One fault on its way: how long it may take, what it is random by, what it found."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from tests.chaos.auditor import Findings, audit
from tests.chaos.deployment import AppendFsync, Deployment
from tests.chaos.ledger import Ledger, Load
from tests.chaos.nursery import Nursery


@final
@dataclass
class Row:
    """What is said of a fault."""

    fault: str
    kills: int = 0
    accepted: int = 0
    applied: int = 0
    duplicates: int = 0
    lost: int = 0
    twice: int = 0
    innocents: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: Folders with logs and data, kept when something is wrong.
    kept: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.problems or self.lost or self.twice or self.innocents)

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "BROKEN"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


@final
class Run:
    """What a fault is given."""

    def __init__(self, fault: str, nursery: Nursery, *, seconds: float, seed: int, timed: bool = False) -> None:
        """`timed`: times that are aimed at have to be kept, which a machine busy with other tests may not."""
        self._timed = timed
        self.rng = random.Random(f"{fault}:{seed}")
        self.seconds = seconds
        self.row = Row(fault)
        self._nursery = nursery
        self._started = time.monotonic()
        self._deadline: float | None = None

    def going(self) -> bool:
        """Whether there is time left; it starts to run when this is first asked, with everything in place."""
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
        """Processes to hurt; their logs and data stay when an invariant is broken."""
        deployment = Deployment(
            self._nursery, servers=servers, workers=workers, appendfsync=appendfsync, settings=settings
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
    def load(self, deployment: Deployment, ledger: Ledger, **options: Any) -> Iterator[Load]:
        """Clients that work while the fault is done to the deployment, and finish after it."""
        load = Load(ledger, deployment.urls, self.rng, **options)
        load.start()
        try:
            yield load
        finally:
            load.stop()

    def close_books(self, deployment: Deployment, ledger: Ledger, **options: Any) -> Findings:
        """Audit, and take what was found into the row."""
        findings = audit(deployment.valkey.client, ledger, **options)
        row = self.row
        row.accepted += findings.acknowledged
        row.applied += findings.applied
        row.duplicates += ledger.duplicates_refused
        row.lost += findings.lost
        row.twice += findings.twice
        row.innocents += findings.innocents
        row.problems += findings.problems
        return findings

    def note(self, text: str) -> None:
        self.row.notes.append(text)

    def expect(self, holds: object, problem: str) -> None:
        """An invariant of this fault alone."""
        if not holds:
            self.row.problems.append(problem)

    def aim(self, times_s: Sequence[float], most_s: float, what: str) -> None:
        """How long something took each time, and how long it may."""
        self.note(f"{what} after {', '.join(f'{took:.1f}' for took in times_s)} s")
        if max(times_s) > most_s:
            missed = f"{what} after {max(times_s):.1f} s, not within {most_s:g} s"
            if self._timed:
                self.expect(False, missed)
            else:
                self.note(missed)

    def finish(self, work: Callable[[Run], None]) -> Row:
        """Do it; whatever it raises is a broken invariant too."""
        try:
            work(self)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.row.problems.append(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
        self.row.seconds = time.monotonic() - self._started
        return self.row
