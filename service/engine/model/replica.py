"""Keeps the served parameters up to date: tails the update logs, loads changed users, checks them, swaps them in.

It also knows which events the served parameters include, for requests that wait for one.

An epoch may change the inputs, so parameters of two epochs are not mixed. A user fitted under an epoch that is not
served yet is served by the state which that refit replaced; without one, the user is deferred until that epoch. When a
log was trimmed past the replica's cursor, versions are compared instead.

After an outage versions are compared too, and the store's state is served even if it is older: a restarted store may
have lost its latest writes. An outage between two commands shows in the id of the server, which comes with each read.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextvars import Context
from typing import Final, TypeAlias, TypeVar, final

import structlog

from metaban.models.default.calibration import ReliabilityTable
from metaban.service.engine.model.served_model import BRIEFS_A_TURN, NONE_REPLACEABLE, ServedModel
from metaban.service.engine.model.types import StateVersion
from metaban.service.engine.model.warm_starts import ServedFusion
from metaban.service.telemetry.metrics import NamespaceMetrics
from metaban.store.client.connection import BEFORE_ALL
from metaban.store.errors import StoreError, StoreUnavailable
from metaban.store.shared.epochs import Epoch, EpochStore
from metaban.store.users.logs import EPOCHS, Log, NamespaceLogs
from metaban.store.users.records import UpdateEntry, UserState
from metaban.store.users.users import UserStore

#: Longest blocking read of a log; also how long stop() may take.
TAIL_BLOCK_MS: Final = 1_000

#: Entries of a log read at a time.
TAIL_ENTRIES: Final = 512

#: Users loaded per call.
LOAD_USERS: Final = 256

#: Pause after a failed read.
UNAVAILABLE_PAUSE_S: Final = 0.25

#: Applied events remembered, for callers that ask afterwards.
APPLIED_REMEMBERED: Final = 65_536

#: Partition and entry id of an event.
Entry: TypeAlias = tuple[int, str]

log = structlog.get_logger()

Result = TypeVar("Result")


@final
class AppliedEvents:
    """Events recently applied to the served parameters, and the callers that wait for one. Event loop only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Entry, None] = OrderedDict()
        self._waiters: dict[Entry, set[asyncio.Future[None]]] = {}

    def __contains__(self, entry: Entry) -> bool:
        """Whether an event was recently applied."""
        return entry in self._seen

    @property
    def awaited(self) -> int:
        """Number of events that callers wait for."""
        return len(self._waiters)

    async def wait(self, entry: Entry) -> None:
        """Return once an event is applied."""
        if entry in self._seen:
            return
        # One future per caller, so that a cancelled one does not affect the others.
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(entry, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(entry, None)

    def settle(self, entries: Iterable[Entry]) -> None:
        """Record applied events and wake the callers that wait for them."""
        for entry in entries:
            self._seen[entry] = None
            for waiter in self._waiters.pop(entry, ()):
                if not waiter.done():
                    waiter.set_result(None)
        while len(self._seen) > APPLIED_REMEMBERED:
            self._seen.popitem(last=False)

    def forget(self, partition: int) -> None:
        """Forget the events of a partition: the store may have lost the latest ones."""
        for entry in [entry for entry in self._seen if entry[0] == partition]:
            del self._seen[entry]


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
        logs: NamespaceLogs,
        *,
        partitions: int,
    ) -> None:
        self._users = users
        self._epochs = epochs
        self._fusion = fusion
        self._model = model
        self._compute = compute
        self._metrics = metrics
        self._logs = logs
        self._partitions = partitions
        self._log = log.bind(namespace=metrics.namespace)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._failing: set[str] = set()
        self._outages = 0
        self._epoch: tuple[int, int] | None = None  # number and creation time of the served epoch
        self.reliability: ReliabilityTable | None = None  # of the predictions, stored with that epoch
        self._applied: dict[int, int] = {}
        self._done = AppliedEvents()
        self._deferred: dict[str, list[tuple[int, str]]] = {}
        self._loading = asyncio.Lock()
        self._unread: dict[int, list[UpdateEntry]] = {}
        self._cursors: dict[Log, str] = {}
        self._published = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._epoch_changed = asyncio.Condition()
        self._briefing: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Whether all logs are followed."""
        return bool(self._tasks) and not self._failing and not any(task.done() for task in self._tasks)

    async def start(self) -> None:
        """Load the current state, then follow the logs from just before it."""
        servers = [await self._logs.server(group) for group in self._logs.groups]
        cursors: dict[Log, str] = {EPOCHS: await self._epochs.log_head()}
        for partition in range(self._partitions):
            cursors[partition] = await self._users.log_head(partition)
        await self._adopt_current()
        await self._fusion.follow()
        for partition in range(self._partitions):
            await self._resync(partition)
        self._cursors = cursors
        followers = [self._adopt_published(), *map(self._follow, self._logs.groups, servers)]
        # An empty context: log lines must not carry the id of the request that started the tasks.
        self._tasks = [asyncio.create_task(follower, context=Context()) for follower in followers]

    async def stop(self) -> None:
        """Stop following the logs; loaded parameters stay served."""
        self._stopping = True
        for task in self._tasks:
            # The flag too: before Python 3.12 `asyncio.wait_for`, used by the driver, may lose a cancellation.
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._briefing is not None:
            await self._briefing

    async def refresh(self, user: str) -> None:
        """Load and serve the newest state of a user, if any."""
        await self.put((await self._users.load([user])).values())

    def saw(self, partition: int, entry_id: str) -> bool:
        """Whether the log recently reported an event as applied."""
        return (partition, entry_id) in self._done

    async def wait_applied(self, partition: int, entry_id: str, timeout_s: float) -> bool:
        """Wait until an event is in the served parameters of its user; False on time-out.

        The epoch that it makes due may take long, for it may refit all users: `wait_epoch` waits for one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait((partition, entry_id))
        except TimeoutError:
            return False
        return True

    async def wait_epoch(self, number: int, timeout_s: float) -> bool:
        """Wait until an epoch of at least this number is served; False on time-out."""
        if self._model.epoch_number >= number:
            return True
        try:
            async with asyncio.timeout(timeout_s), self._epoch_changed:
                await self._epoch_changed.wait_for(lambda: self._model.epoch_number >= number)
        except TimeoutError:
            return False
        return True

    @property
    def epoch_due(self) -> bool:
        """Whether applied events make a later epoch due than the served one."""
        return self._model.learner.epoch_due(self._model.epoch_events, sum(self._applied.values()))

    async def _follow(self, logs: Sequence[Log], server: str) -> None:
        """Follow logs that are read together: all of them, or one in a cluster.

        `server` had them before the current state was loaded.
        """
        place = "logs" if len(logs) > 1 else "epoch log" if logs[0] == EPOCHS else f"partition {logs[0]}"
        compared: int | None = 0
        while not self._stopping:
            try:
                # Any follower may have noticed the outage: this one may have missed a restart.
                if (outages := self._outages) != compared:
                    server = await self._logs.server(logs)
                    for followed in logs:
                        await self._compare(followed)
                    compared = outages
                self._recovered(place)
                cursors = {followed: self._cursors[followed] for followed in logs}
                read = await self._logs.read(cursors, block_ms=TAIL_BLOCK_MS, count=TAIL_ENTRIES)
                if read.server != server:
                    # A restart between two reads fails no command: the driver replaces idle connections silently.
                    self._log.warning("replica_server_changed", following=place)
                    compared = None
                    continue
                if read.published is not None:
                    self._cursors[EPOCHS] = read.published
                    self._published.set()
                for partition, entries in read.updates.items():
                    # So far behind that lines may have been trimmed; `_missed` detects only lines that name events.
                    if len(entries) >= TAIL_ENTRIES and not await self._users.logged(partition, cursors[partition]):
                        await self._resync(partition)
                if read.updates:
                    self._unread |= read.updates
                    await self._apply_unread()
            except Exception as error:
                await self._pause(place, error)

    async def _adopt_published(self) -> None:
        """Serve each published epoch; users of the current one are updated meanwhile."""
        while not self._stopping:
            try:
                await self._published.wait()
                self._published.clear()
                await self._adopt_current()
                await self._fusion.follow()
                self._recovered("epochs")
            except Exception as error:
                self._published.set()
                await self._pause("epochs", error)

    async def _pause(self, place: str, error: Exception) -> None:
        """Wait before the next attempt after any error: a follower must never end."""
        if self._stopping:
            return
        if not isinstance(error, StoreUnavailable):
            self._log.error("replica_follow_failed", following=place, exc_info=error)
        elif not self._failing:
            self._log.warning("replica_interrupted", following=place, error=str(error))
        if isinstance(error, StoreUnavailable) and place not in self._failing:
            self._outages += 1
        self._failing.add(place)
        await asyncio.sleep(UNAVAILABLE_PAUSE_S)

    def _recovered(self, place: str) -> None:
        if place in self._failing:
            self._failing.remove(place)
            if not self._failing:
                self._log.info("replica_recovered")

    async def _apply_unread(self) -> None:
        """Load the users that new log lines name, and wake the callers that wait for them.

        Partitions that find a load in progress wait for it, and then one of them applies all new lines at once. A
        cursor advances only when its lines are applied: lines of a failed load are read again.
        """
        async with self._loading:
            unread, self._unread = self._unread, {}
            await self._apply(unread)

    async def _apply(self, unread: dict[int, list[UpdateEntry]]) -> None:
        users = dict.fromkeys(entry.user_id for entries in unread.values() for entry in entries)
        await self._begin_incarnations(
            (entry.user_id, entry.incarnation) for entries in unread.values() for entry in entries if not entry.version
        )
        early = await self._load(user for user in users if self._model.wants(user))
        for partition, entries in unread.items():
            if self._missed(partition, entries):
                await self._resync(partition)
        now = time.time()
        for partition, entries in unread.items():
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

    def _missed(self, partition: int, entries: list[UpdateEntry]) -> bool:
        """Whether lines were trimmed before they were read: the lines name fewer events than were applied."""
        named = sum(len(entry.entry_ids) for entry in entries)
        return self._applied.get(partition, 0) + named < entries[-1].applied

    async def _load(self, users: Iterable[str], *, older_too: bool = False) -> set[str]:
        """Load users and serve them; returns those who can be served only under a later epoch. They are deferred."""
        ids = list(users)
        early: set[str] = set()
        for start in range(0, len(ids), LOAD_USERS):
            # Checked again for each part: the pool may be full by now.
            part = [user for user in ids[start : start + LOAD_USERS] if self._model.wants(user)]
            replaceable = self._held(part) if older_too else {}
            loaded = await self._users.load(part)
            early |= loaded.keys() - (await self.put(loaded.values(), replaceable)).keys()
        self._defer(dict.fromkeys(early, ()))
        return early

    async def put(
        self, states: Collection[UserState], replaceable: Mapping[str, StateVersion] = NONE_REPLACEABLE
    ) -> dict[str, UserState]:
        """Serve loaded states, or those they replaced if their epoch is not served yet.

        Returns them by user, without users that have no state for the served epoch.
        """
        if not states:
            return {}
        early = [state for state in states if state.epoch > self._model.epoch_number]
        # While the new state of a forgotten or restored user is deferred, the old one must not be served.
        await self._begin_incarnations((state.user_id, state.incarnation) for state in early)
        replaced = await self._users.load_replaced(early)
        ready = await self._run(lambda: self._put(states, replaced, replaceable))
        if ready:
            self._brief_soon()
        return ready

    def _put(
        self,
        states: Collection[UserState],
        replaced: Mapping[str, UserState],
        replaceable: Mapping[str, StateVersion],
    ) -> dict[str, UserState]:
        # On the model's thread, where no epoch can be adopted between the choice of states and their use.
        served = self._model.epoch_number
        fitting = (state if state.epoch <= served else replaced.get(state.user_id) for state in states)
        ready = {state.user_id: state for state in fitting if state is not None and state.epoch <= served}
        self._model.put(list(ready.values()), replaceable)
        return ready

    async def _begin_incarnations(self, began: Iterable[tuple[str, int]]) -> None:
        """Stop serving earlier incarnations of users than these."""
        pairs = [(user, incarnation) for user, incarnation in began if incarnation]
        if pairs:
            await self._run(lambda: self._model.begin_incarnations(pairs))

    def _held_in(self, partition: int) -> set[str]:
        return {user for user in self._model.users() if self._users.partition_of(user) == partition}

    def _drop(self, users: Iterable[str]) -> None:
        for user in users:
            self._model.remove(user)

    def _held(self, users: Iterable[str]) -> dict[str, StateVersion]:
        return {user: held for user in users if (held := self._model.holds(user)) is not None}

    def _brief_soon(self) -> None:
        """Renew briefs of recently asked users, a few at a time between requests."""
        if not self._stopping and (self._briefing is None or self._briefing.done()):
            self._briefing = asyncio.create_task(self._brief_all(), context=Context())

    async def _brief_all(self) -> None:
        while await self._run(lambda: self._model.refresh(BRIEFS_A_TURN)) and not self._stopping:
            pass

    async def _compare(self, followed: Log) -> None:
        """Serve the store's state after an outage, as far as a log reports it."""
        if followed == EPOCHS:
            self._cursors[EPOCHS] = await self._epochs.log_head()
            self._published.set()
        else:
            await self._compare_users(followed)

    async def _compare_users(self, partition: int) -> None:
        """Serve the store's users of a partition after an outage.

        If the log still has the line at the cursor, it has all lines before it, and comparing versions is enough. If
        not, the store may have lost its latest writes, and equal versions may stand for other events.
        """
        head, cursor = await self._users.log_head(partition), self._cursors[partition]
        # Incarnations learned from other sources may be ahead of the log; those that the store has are set again below.
        await self._run(
            lambda: self._model.accept_any_incarnation(lambda user: self._users.partition_of(user) == partition)
        )
        if cursor == BEFORE_ALL or await self._users.logged(partition, cursor):
            await self._resync(partition)
            return
        self._log.warning("replica_cursor_lost", partition=partition)
        await self._resync(partition, trust_versions=False)
        self._cursors[partition] = head
        self._done.forget(partition)

    async def _resync(self, partition: int, *, trust_versions: bool = True) -> None:
        """Compare versions with the store's, load users that differ, even older ones, and drop missing users."""
        held = await self._run(lambda: self._held_in(partition))
        versions = await self._users.versions(partition)
        applied = await self._users.applied_in(partition)
        if gone := held - versions.keys():
            # A user who was created again meanwhile is loaded when asked about.
            await self._run(lambda: self._drop(gone))
        await self._begin_incarnations(
            (user, incarnation) for user, (incarnation, version) in versions.items() if not version
        )
        moved = []
        for user, stored in versions.items():
            held_version = self._model.holds(user)
            same = held_version is not None and (held_version.incarnation, held_version.version) == stored
            if stored[1] and not (same and trust_versions) and self._model.wants(user):
                moved.append(user)
        await self._load(sorted(moved), older_too=True)
        self._applied[partition] = applied

    async def _adopt_current(self) -> None:
        """Serve the newest epoch, with the users deferred to it or refitted by it."""
        async with self._adopting:
            epoch = await self._epochs.current()
            if epoch is None or self._serves(epoch):
                return
            # Numbers only grow, unless the store lost the served epoch and the users fitted under it.
            lost = epoch.number <= self._model.epoch_number
            refitted = epoch.refitted > self._model.epoch_number
            wanted = {user for user in epoch.members if user not in self._model}
            if lost or refitted:
                wanted |= set(self._model.users())
            replaceable = self._held(wanted) if lost else {}
            states: list[UserState] = []
            ordered = sorted(wanted | set(self._deferred))
            for start in range(0, len(ordered), LOAD_USERS):
                states += (await self._users.load(ordered[start : start + LOAD_USERS])).values()
            if not await self._run(lambda: self._swap(epoch, states, replaceable)):
                reason = "not finite, or not of this learner; the previous one stays served"
                self._log.error("epoch_refused", number=epoch.number, reason=reason)
                return
            self._epoch = (epoch.number, epoch.created_ms)
            self._brief_soon()
            self._metrics.served_epoch.set(epoch.number)
            self._metrics.served_epoch_made.set(epoch.created_ms / 1_000)
            self.reliability = ReliabilityTable.of(epoch.tensors)
            self._metrics.set_calibration(self.reliability)
            if refitted:
                self._defer(dict.fromkeys(self._behind(epoch), ()))
            await self._serve_deferred()
            self._log.info("epoch_served", number=epoch.number, events=epoch.events, users=len(self._model))
        async with self._epoch_changed:
            self._epoch_changed.notify_all()

    def _serves(self, epoch: Epoch) -> bool:
        if self._epoch is None:
            # A new model starts with the first epoch.
            return epoch.number <= self._model.epoch_number
        return self._epoch == (epoch.number, epoch.created_ms)

    def _behind(self, epoch: Epoch) -> list[str]:
        """Users held under earlier inputs: they came while the epoch was adopted, or the next refit has begun."""
        return [user for user, held in self._held(self._model.users()).items() if held.epoch < epoch.refitted]

    async def _serve_deferred(self) -> None:
        """Load the users deferred to this epoch again: some were deferred while it was being adopted."""
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
        """Remember users, and the events to report with them, until a later epoch."""
        for user, entries in waiting.items():
            self._deferred.setdefault(user, []).extend(entries)

    def _swap(self, epoch: Epoch, states: list[UserState], replaceable: Mapping[str, StateVersion]) -> bool:
        adopted = self._model.adopt_epoch(epoch.number, epoch.events, epoch.tensors, epoch.members)
        if adopted:
            self._model.put([state for state in states if state.epoch <= epoch.number], replaceable)
        return adopted

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Run a function on the model's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
