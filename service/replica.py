"""Keeps the served parameters fresh: tails the update logs, loads what moved, checks it, swaps it in.

A user fitted under an epoch that is not published yet waits for that epoch: parameters of two epochs are not mixed
where one changes the inputs. When a log was trimmed past our place in it, versions are compared instead.

After an outage they are compared too, and what the store has is served even where it is older: restarted, it may have
lost its latest writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextvars import Context
from typing import TypeVar, final

import structlog

from models.calibration import Reliability
from service.applied import AppliedEvents
from service.metrics import NamespaceMetrics
from service.scoring import Standing
from service.served import BRIEFS_A_TURN, NOTHING_DOUBTED, ServedModel
from service.warm_starts import ServedFusion
from store.connection import BEFORE_ALL
from store.epochs import Epoch, EpochStore
from store.errors import StoreError, StoreUnavailable
from store.users import UpdateEntry, UserState, UserStore

#: Longest wait for news; also how long a stop may take.
TAIL_BLOCK_MS = 1_000
TAIL_ENTRIES = 512
#: Users loaded in one go.
LOAD_USERS = 256
#: Pause after the store did not answer.
UNAVAILABLE_PAUSE_S = 0.25

log = structlog.get_logger()
Result = TypeVar("Result")


@final
class Replica:
    """One namespace's parameters in this process."""

    def __init__(
        self,
        users: UserStore,
        epochs: EpochStore,
        fusion: ServedFusion,
        model: ServedModel,
        compute: Executor,
        metrics: NamespaceMetrics,
        *,
        partitions: int,
    ) -> None:
        self._users = users
        self._epochs = epochs
        self._fusion = fusion
        self._model = model
        self._compute = compute
        self._metrics = metrics
        self._partitions = partitions
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._failing: set[str] = set()
        self._outages = 0
        self._epoch: tuple[int, int] | None = None  # number and time of the epoch that was adopted last
        self.reliability: Reliability | None = None  # of predictions, as that epoch tells it
        self._applied: dict[int, int] = {}
        self._done = AppliedEvents()
        self._deferred: dict[str, list[tuple[int, str]]] = {}
        self._loading = asyncio.Lock()
        self._news: dict[int, list[UpdateEntry]] = {}
        self._cursors: dict[int, str] = {}
        self._adopting = asyncio.Lock()
        self._epoch_changed = asyncio.Condition()
        self._briefing: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Whether every log is being followed."""
        return bool(self._tasks) and not self._failing and not any(task.done() for task in self._tasks)

    async def start(self) -> None:
        """Load what is there, then follow the logs from just before that."""
        epoch_cursor = await self._epochs.log_head()
        cursors = {partition: await self._users.log_head(partition) for partition in range(self._partitions)}
        await self._adopt_current()
        await self._fusion.follow()
        for partition in range(self._partitions):
            await self._resync(partition)
        self._cursors = cursors
        followers = [self._follow_epochs(epoch_cursor), *map(self._follow, cursors)]
        # A context of their own: started by a first request, they would carry its id in all their log lines.
        self._tasks = [asyncio.create_task(follower, context=Context()) for follower in followers]

    async def stop(self) -> None:
        """Stop following; what is loaded stays served."""
        self._stopping = True
        for task in self._tasks:
            # Before Python 3.12 a cancellation may get lost in `asyncio.wait_for`, below the driver: hence the flag.
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._briefing is not None:
            await self._briefing

    def __contains__(self, user: str) -> bool:
        """Whether a user is served from memory."""
        return user in self._model

    async def take(self, states: Iterable[UserState]) -> None:
        """Serve states that were just loaded."""
        await self._put(states)

    async def refresh(self, user: str) -> None:
        """Serve the newest state of a user now, if they have one."""
        await self.take((await self._users.load([user])).values())

    def saw(self, partition: int, entry_id: str) -> bool:
        """Whether an event's application came by in the log lately."""
        return (partition, entry_id) in self._done

    async def wait_applied(self, partition: int, entry_id: str, timeout_s: float) -> bool:
        """Whether an event is in the served parameters, and every epoch it made due, within the time given."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait((partition, entry_id))
                async with self._epoch_changed:
                    await self._epoch_changed.wait_for(lambda: not self._epoch_due())
        except TimeoutError:
            return False
        return True

    async def wait_epoch(self, number: int, timeout_s: float) -> bool:
        """Whether an epoch of at least this number is served within the time given."""
        if self._model.epoch_number >= number:
            return True
        try:
            async with asyncio.timeout(timeout_s), self._epoch_changed:
                await self._epoch_changed.wait_for(lambda: self._model.epoch_number >= number)
        except TimeoutError:
            return False
        return True

    def _epoch_due(self) -> bool:
        return self._model.learner.epoch_due(self._model.epoch_events, sum(self._applied.values()))

    async def _follow(self, partition: int) -> None:
        place = f"partition {partition}"
        compared = 0
        while not self._stopping:
            try:
                # An outage that any follower noticed: the others may have slept through a restart.
                if (outages := self._outages) != compared:
                    await self._compare(partition)
                    compared = outages
                self._recovered(place)
                cursor = self._cursors[partition]
                entries = await self._users.tail(partition, cursor, block_ms=TAIL_BLOCK_MS, count=TAIL_ENTRIES)
                # So far behind that lines may have been trimmed, and not every line counts events: see `_missed`.
                if len(entries) >= TAIL_ENTRIES and not await self._users.logged(partition, cursor):
                    await self._resync(partition)
                if entries:
                    self._news[partition] = entries
                    await self._absorb_news()
            except Exception as error:
                await self._pause(place, error)

    async def _follow_epochs(self, cursor: str) -> None:
        compared = 0
        while not self._stopping:
            try:
                if (outages := self._outages) != compared or "epochs" in self._failing:
                    cursor = await self._epochs.log_head()
                    await self._adopt_current()
                    await self._fusion.follow()
                    compared = outages
                self._recovered("epochs")
                published = await self._epochs.tail(cursor, TAIL_BLOCK_MS)
                if published:
                    await self._adopt_current()
                    await self._fusion.follow()
                    cursor = published[-1][0]
            except Exception as error:
                await self._pause("epochs", error)

    async def _pause(self, place: str, error: Exception) -> None:
        """Wait before trying again, whatever went wrong: a follower that ended would leave users behind for good."""
        if self._stopping:
            return
        if not isinstance(error, StoreUnavailable):
            log.error("replica cannot follow", following=place, exc_info=error)
        elif not self._failing:
            log.warning("replica fell behind", following=place, error=str(error))
        if isinstance(error, StoreUnavailable) and place not in self._failing:
            self._outages += 1
        self._failing.add(place)
        await asyncio.sleep(UNAVAILABLE_PAUSE_S)

    def _recovered(self, place: str) -> None:
        if place in self._failing:
            self._failing.remove(place)
            if not self._failing:
                log.info("replica follows again")

    async def _absorb_news(self) -> None:
        """Load the users that the logs name and tell those who wait for them.

        Partitions that find a load under way wait for it and then take all that has come in meanwhile in one go. The
        place in a log moves on only when its lines are absorbed: lines of a load that failed are read again.
        """
        async with self._loading:
            news, self._news = self._news, {}
            await self._absorb(news)

    async def _absorb(self, news: dict[int, list[UpdateEntry]]) -> None:
        users = dict.fromkeys(entry.user_id for entries in news.values() for entry in entries)
        await self._begin(
            (entry.user_id, entry.incarnation) for entries in news.values() for entry in entries if not entry.version
        )
        early = await self._load(user for user in users if self._model.wants(user))
        for partition, entries in news.items():
            if self._missed(partition, entries):
                await self._resync(partition)
        now = time.time()
        for partition, entries in news.items():
            self._cursors[partition] = entries[-1].cursor
            self._applied[partition] = max(self._applied.get(partition, 0), entries[-1].applied)
            for entry in entries:
                applied = [(partition, entry_id) for entry_id in entry.entry_ids]
                if entry.user_id in early:
                    self._defer({entry.user_id: applied})
                else:
                    self._done.settle(applied)
                self._metrics.freshness_seconds.observe(max(0.0, now - int(entry.cursor.split("-")[0]) / 1_000))
        self._metrics.users_resident.set(len(self._model))
        async with self._epoch_changed:
            self._epoch_changed.notify_all()

    def _missed(self, partition: int, entries: list[UpdateEntry]) -> bool:
        """Whether the log was trimmed before we read on: its lines name fewer events than were applied."""
        named = sum(len(entry.entry_ids) for entry in entries)
        return self._applied.get(partition, 0) + named < entries[-1].applied

    async def _load(self, users: Iterable[str], *, older_too: bool = False) -> set[str]:
        """Load users and serve them; returns those fitted under an epoch that is not served yet."""
        ids = list(users)
        early: set[str] = set()
        for start in range(0, len(ids), LOAD_USERS):
            # Asked again for each part: the pool may be full by now.
            part = [user for user in ids[start : start + LOAD_USERS] if self._model.wants(user)]
            doubted = self._held(part) if older_too else {}
            early |= await self._put((await self._users.load(part)).values(), doubted)
        self._defer(dict.fromkeys(early, ()))
        return early

    async def _put(self, states: Iterable[UserState], doubted: Mapping[str, Standing] = NOTHING_DOUBTED) -> set[str]:
        served = self._model.epoch_number
        ready = [state for state in states if state.epoch <= served]
        early = {state.user_id for state in states if state.epoch > served}
        # Whoever began anew is not served as they were before while their new state waits.
        await self._begin((state.user_id, state.incarnation) for state in states if state.user_id in early)
        if ready:
            await self._run(lambda: self._model.put(ready, doubted))
            self._brief_soon()
        return early

    async def _begin(self, began: Iterable[tuple[str, int]]) -> None:
        """Have nothing served any more of earlier incarnations than these of users."""
        pairs = [(user, incarnation) for user, incarnation in began if incarnation]
        if pairs:
            await self._run(lambda: self._model.begin(pairs))

    def _held_in(self, partition: int) -> set[str]:
        return {user for user in self._model.users() if self._users.partition_of(user) == partition}

    def _drop(self, users: Iterable[str]) -> None:
        for user in users:
            self._model.remove(user)

    def _held(self, users: Iterable[str]) -> dict[str, Standing]:
        return {user: standing for user in users if (standing := self._model.holds(user)) is not None}

    def _brief_soon(self) -> None:
        """Have the model prepare for whoever is likely to ask next, a few users at a time between requests."""
        if not self._stopping and (self._briefing is None or self._briefing.done()):
            self._briefing = asyncio.create_task(self._brief_all(), context=Context())

    async def _brief_all(self) -> None:
        while await self._run(lambda: self._model.refresh(BRIEFS_A_TURN)) and not self._stopping:
            pass

    async def _compare(self, partition: int) -> None:
        """Serve what the store has after an outage.

        While our place in the log is there, all before it is too, and versions tell the rest. Where it is not, the
        store may have lost what it wrote last, and the same versions may mean other events by now.
        """
        head, cursor = await self._users.log_head(partition), self._cursors[partition]
        # Told of directly, they may be ahead of our place in the log; those that the store has are begun again below.
        await self._run(lambda: self._model.doubt_beginnings(lambda user: self._users.partition_of(user) == partition))
        if cursor == BEFORE_ALL or await self._users.logged(partition, cursor):
            await self._resync(partition)
            return
        log.warning("replica lost its place", partition=partition)
        await self._resync(partition, trust_versions=False)
        self._cursors[partition] = head
        self._done.doubt(partition)

    async def _resync(self, partition: int, *, trust_versions: bool = True) -> None:
        """Compare versions with the store's, load what differs, be it older, and drop whom it does not have."""
        held = await self._run(lambda: self._held_in(partition))
        versions = await self._users.versions(partition)
        applied = await self._users.applied_in(partition)
        if gone := held - versions.keys():
            # Whoever has come back since is loaded again when asked about.
            await self._run(lambda: self._drop(gone))
        await self._begin((user, incarnation) for user, (incarnation, version) in versions.items() if not version)
        moved = []
        for user, stored in versions.items():
            standing = self._model.holds(user)
            same = standing is not None and (standing.incarnation, standing.version) == stored
            if stored[1] and not (same and trust_versions) and self._model.wants(user):
                moved.append(user)
        await self._load(sorted(moved), older_too=True)
        self._applied[partition] = applied

    async def _adopt_current(self) -> None:
        """Serve the newest epoch, with the users that were waiting for it or have to change with it."""
        async with self._adopting:
            epoch = await self._epochs.current()
            if epoch is None or self._serves(epoch):
                return
            # Numbers only grow, unless the store lost the epoch that we serve, and users fitted under it.
            lost = epoch.number <= self._model.epoch_number
            wanted = {user for user in epoch.members if user not in self._model}
            if lost or epoch.refitted > self._model.epoch_number:
                wanted |= set(self._model.users())
            doubted = self._held(wanted) if lost else {}
            states: list[UserState] = []
            ordered = sorted(wanted | set(self._deferred))
            for start in range(0, len(ordered), LOAD_USERS):
                states += (await self._users.load(ordered[start : start + LOAD_USERS])).values()
            if not await self._run(lambda: self._swap(epoch, states, doubted)):
                log.error("epoch refused", number=epoch.number, reason="not finite; the one before stays served")
                return
            self._epoch = (epoch.number, epoch.created_ms)
            self._brief_soon()
            self._metrics.served_epoch.set(epoch.number)
            self._metrics.served_epoch_made.set(epoch.created_ms / 1_000)
            self.reliability = Reliability.of(epoch.tensors)
            self._metrics.set_calibration(self.reliability)
            await self._serve_deferred()
            log.info("epoch served", number=epoch.number, events=epoch.events, users=len(self._model))
        async with self._epoch_changed:
            self._epoch_changed.notify_all()

    def _serves(self, epoch: Epoch) -> bool:
        if self._epoch is None:
            # The first epoch is what a model is made with.
            return epoch.number <= self._model.epoch_number
        return self._epoch == (epoch.number, epoch.created_ms)

    async def _serve_deferred(self) -> None:
        """Load once more whoever waited for this epoch: some may have come to wait while it was being adopted."""
        waiting, self._deferred = self._deferred, {}
        try:
            early = await self._load(waiting)
        except StoreError:
            self._defer(waiting)
            raise
        self._defer({user: waiting[user] for user in early})
        for user, entries in waiting.items():
            if user not in early:
                self._done.settle(entries)

    def _defer(self, waiting: Mapping[str, Iterable[tuple[int, str]]]) -> None:
        """Keep users, and the events that are told with them, for an epoch to come."""
        for user, entries in waiting.items():
            self._deferred.setdefault(user, []).extend(entries)

    def _swap(self, epoch: Epoch, states: list[UserState], doubted: Mapping[str, Standing]) -> bool:
        adopted = self._model.adopt_epoch(epoch.number, epoch.events, epoch.tensors, epoch.members)
        if adopted:
            self._model.put([state for state in states if state.epoch <= epoch.number], doubted)
        return adopted

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Touch the model on the one thread that owns it."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
