"""Admin: transfer jobs, which find the users that help a target, and the clusters that they can be about."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, final

from metaban.models.transfer.metrics import needs_groups
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.errors import InvalidInput, NotFound, Overloaded
from metaban.store.codec import now_ms
from metaban.store.errors import CorruptRecord
from metaban.store.shared.transfer import (
    SOURCES_MIN,
    TARGET_SAMPLES_MIN,
    WAITING_MAX,
    TransferJobRecord,
    TransferQuestion,
    TransferStore,
)
from metaban.store.users.users import UserStore

#: Retry-After when too many jobs wait; a job takes seconds.
RETRY_AFTER_S: Final = 10.0

UNKNOWN: Final = "has no stored rewards: a source needs rewards that were learned"


@final
@dataclass(frozen=True, slots=True)
class TransferView:
    """The remembered jobs, the newest first, and the number of clusters in the served epoch; 0 before the first."""

    jobs: tuple[TransferJobRecord, ...]
    clusters: int
    model_version: int


@final
class TransferAdmin:
    """Shows and requests the transfer jobs of one namespace."""

    def __init__(self, guard: StoreGuard, users: UserStore, transfer: TransferStore, host: ModelHost) -> None:
        self._guard = guard
        self._users = users
        self._transfer = transfer
        self._host = host

    async def describe(self) -> TransferView:
        """All jobs, and the number of clusters."""
        jobs = await self._guard.call(lambda: self._transfer.jobs(now_ms()))
        serving = self._host.serving
        return TransferView(tuple(jobs), self._clusters, 0 if serving is None else serving.model.epoch_number)

    async def job(self, job_id: str) -> tuple[TransferJobRecord, dict[str, Any] | None]:
        """A job and its result; NotFound when it is not remembered."""
        try:
            found = await self._guard.call(lambda: self._transfer.job(job_id, now_ms()))
        except CorruptRecord:
            found = None
        if found is None:
            raise NotFound("There is no such job: a job is deleted after a day, or when a user it names is forgotten.")
        return found

    async def request(self, question: TransferQuestion) -> TransferJobRecord:
        """Request a job; returns it, or an equal earlier one that waits or runs.

        InvalidInput when the question cannot be answered as far as the service can check; the worker checks the rest.
        """
        self._check(question)
        return await self._guard.call(lambda: self._request(question))

    def _check(self, question: TransferQuestion) -> None:
        """The checks that need no store."""
        if (question.user_id is None) == (question.cluster is None):
            raise InvalidInput(("user_id",), "name the target: either user_id or cluster, not both")
        seen: set[str] = set()
        for place, source in enumerate(question.sources or ()):
            if source == question.user_id:
                raise InvalidInput(("sources", place), "is the target itself: name other users")
            if source in seen:
                raise InvalidInput(("sources", place), "is named twice: name each source once")
            seen.add(source)
        if needs_groups(question.metric) and question.cluster is None:
            raise InvalidInput(
                ("metric",), "compares users of the target: it needs a cluster as the target, not a user_id"
            )
        clusters = self._clusters
        if question.cluster is not None and question.cluster >= clusters:
            raise InvalidInput(
                ("cluster",),
                f"does not exist: the users form {clusters} clusters in the served epoch, counted from 0"
                if clusters
                else "does not exist: nothing is learned yet",
            )
        if question.sources is None:
            others = max(0, clusters - (question.cluster is not None))
            if others < SOURCES_MIN:
                raise InvalidInput(
                    ("sources",),
                    f"without them the sources are clusters; at least {SOURCES_MIN} are needed and the served epoch "
                    f"has {others}: name at least {SOURCES_MIN} users",
                )

    @property
    def _clusters(self) -> int:
        """Number of clusters in the served epoch; 0 while nothing is served."""
        serving = self._host.serving
        return 0 if serving is None else serving.model.clusters

    async def _request(self, question: TransferQuestion) -> TransferJobRecord:
        summaries = await asyncio.gather(*(self._users.summary(user) for user in question.named))
        incarnations: dict[str, int] = {}
        for user, summary in zip(question.named, summaries, strict=True):
            target = user == question.user_id
            kept = 0 if summary is None else summary.samples
            if target and kept < TARGET_SAMPLES_MIN:
                raise InvalidInput(
                    ("user_id",),
                    f"has {kept} stored rewards, and a target needs at least {TARGET_SAMPLES_MIN}: ask again when more "
                    "are learned",
                )
            if summary is None or not kept:
                raise InvalidInput(self._place(question, user), UNKNOWN)
            incarnations[user] = summary.incarnation
        asked = await self._transfer.request(question, incarnations, now_ms(), waiting_max=WAITING_MAX)
        # A user forgotten between the two reads must not be named by a job; later, forgetting removes the job.
        gone = await self._users.forgotten_since(incarnations)
        if gone:
            await self._transfer.strike(gone)
            raise InvalidInput(self._place(question, min(gone)), UNKNOWN)
        if asked.job is None:
            raise Overloaded(
                f"{WAITING_MAX} transfer jobs are waiting; try again when one is done.", retry_after_s=RETRY_AFTER_S
            )
        return asked.job

    def _place(self, question: TransferQuestion, user: str) -> tuple[str | int, ...]:
        """The place of a user in the request."""
        sources = question.sources or ()
        return ("sources", sources.index(user)) if user in sources else ("user_id",)
