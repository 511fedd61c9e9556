"""Transfer as admins see it: asking who helps a target, what became of it, and who teaches whom by the served epoch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, final

from models.teaching import Teaching
from models.transfer_metrics import needs_groups
from service.breaker import StoreBreaker
from service.errors import InvalidInput, NotFound, Overloaded
from service.records import now_ms
from service.serving import ServingRoom
from store.errors import CorruptRecord
from store.transfer import SOURCES_MIN, TARGET_SAMPLES_MIN, WAITING_MAX, TransferJob, TransferQuestion, TransferStore
from store.users import UserStore

#: A job takes seconds: whoever finds too many waiting comes back after so long.
RETRY_AFTER_S: Final = 10.0
UNKNOWN: Final = "is nobody of whom rewards are kept: rewards of a source have to be learned first"


@final
@dataclass(frozen=True, slots=True)
class TransferView:
    """The jobs that are remembered, the newest first, and who teaches whom."""

    jobs: tuple[TransferJob, ...]
    #: None where the learner tells no kinds of users apart, or nothing is served yet.
    teaching: Teaching | None
    #: The served epoch, which says so.
    model_version: int


@final
class TransferDesk:
    """Answers for the transfer jobs of one namespace."""

    def __init__(self, breaker: StoreBreaker, users: UserStore, transfer: TransferStore, room: ServingRoom) -> None:
        self._breaker = breaker
        self._users = users
        self._transfer = transfer
        self._room = room

    async def describe(self) -> TransferView:
        """What there is."""
        jobs = await self._breaker.call(lambda: self._transfer.jobs(now_ms()))
        serving = self._room.serving
        if serving is None:
            return TransferView(tuple(jobs), None, 0)
        return TransferView(tuple(jobs), serving.model.teaching, serving.model.epoch_number)

    async def job(self, job_id: str) -> tuple[TransferJob, dict[str, Any] | None]:
        """A job, and what came of it; NotFound when it is not remembered."""
        try:
            found = await self._breaker.call(lambda: self._transfer.job(job_id, now_ms()))
        except CorruptRecord:
            found = None
        if found is None:
            raise NotFound("There is no such job: they are forgotten after a day, and with everyone whom they name.")
        return found

    async def request(self, question: TransferQuestion) -> TransferJob:
        """Have a worker find out; the job that holds, an earlier one while that waits or is under way.

        InvalidInput for what can be seen at once not to work.
        """
        self._check(question)
        return await self._breaker.call(lambda: self._request(question))

    def _check(self, question: TransferQuestion) -> None:
        """Refuse what needs no look into the store to be refused."""
        if (question.user_id is None) == (question.cluster is None):
            raise InvalidInput(("user_id",), "name the target: either user_id or cluster, and not both")
        seen: set[str] = set()
        for place, source in enumerate(question.sources or ()):
            if source == question.user_id:
                raise InvalidInput(("sources", place), "is the target itself: name others")
            if source in seen:
                raise InvalidInput(("sources", place), "is named twice: name each source once")
            seen.add(source)
        if needs_groups(question.metric) and question.cluster is None:
            raise InvalidInput(
                ("metric",), "compares users of the target: it needs a cluster as the target, not a user_id"
            )
        kinds = self._kinds
        if question.cluster is not None and question.cluster >= kinds:
            raise InvalidInput(
                ("cluster",),
                f"does not exist: the served epoch tells {kinds} clusters apart, counted from 0"
                if kinds
                else "does not exist: nothing was learned here yet",
            )
        if question.sources is None:
            others = max(0, kinds - (question.cluster is not None))
            if others < SOURCES_MIN:
                raise InvalidInput(
                    ("sources",),
                    f"without them clusters are the sources, of which it takes {SOURCES_MIN}, and the served epoch has "
                    f"{others}: name at least {SOURCES_MIN} users",
                )

    @property
    def _kinds(self) -> int:
        """Kinds of users that the served epoch tells apart; where it does not, everyone is of one."""
        serving = self._room.serving
        if serving is None:
            return 0
        return 1 if serving.model.teaching is None else serving.model.teaching.kinds

    async def _request(self, question: TransferQuestion) -> TransferJob:
        summaries = await asyncio.gather(*(self._users.summary(user) for user in question.named))
        incarnations: dict[str, int] = {}
        for user, summary in zip(question.named, summaries, strict=True):
            target = user == question.user_id
            kept = 0 if summary is None else summary.samples
            if target and kept < TARGET_SAMPLES_MIN:
                raise InvalidInput(
                    ("user_id",),
                    f"has {kept} rewards that are kept, and a target needs at least {TARGET_SAMPLES_MIN}: ask again "
                    "when more are learned",
                )
            if summary is None or not kept:
                raise InvalidInput(self._place(question, user), UNKNOWN)
            incarnations[user] = summary.incarnation
        asked = await self._transfer.request(question, incarnations, now_ms(), waiting_max=WAITING_MAX)
        # Whoever was forgotten between the two looks is named by nobody; later, forgetting strikes the job by itself.
        gone = await self._users.forgotten_since(incarnations)
        if gone:
            await self._transfer.strike(gone)
            raise InvalidInput(self._place(question, min(gone)), UNKNOWN)
        if asked.job is None:
            raise Overloaded(
                f"{WAITING_MAX} transfer jobs wait already; ask again when one is done.", retry_after_s=RETRY_AFTER_S
            )
        return asked.job

    def _place(self, question: TransferQuestion, user: str) -> tuple[str | int, ...]:
        """Where in the request a user is named."""
        sources = question.sources or ()
        return ("sources", sources.index(user)) if user in sources else ("user_id",)
