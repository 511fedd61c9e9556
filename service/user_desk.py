"""What is known of one user: shown, and forgotten so that nothing is left and everybody can see that it is so."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Final, Literal, final

import structlog

from service.breaker import StoreBreaker
from service.contracts import NearUser, Removed, UserDescription, UserForgotten, UserTraces, WarmStartView
from service.live import LiveSettings
from service.records import now_ms
from service.serving import ServingRoom
from store.connection import Store
from store.decisions import DecisionStore
from store.epochs import EpochStore
from store.errors import CorruptRecord, StoreUnavailable
from store.fusion import FusionStore
from store.history import History
from store.keys import NamespaceKeys
from store.profiles import ProfileStore
from store.traces import Traces
from store.transfer import TransferStore
from store.users import UserStore, UserSummary

#: Open decisions shown of a user, the newest ones.
DECISIONS_SHOWN: Final = 100
#: How long forgetting a user waits for workers to void what waits, and for the history of a private Valkey to be
#: rewritten. Both go on afterwards.
SETTLE_S: Final = 5.0
#: Pause between two looks at the events that wait; workers may be away for long.
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0

log = structlog.get_logger()


@final
class UserDesk:
    """Answers for the users of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        redis: Store,
        keys: NamespaceKeys,
        breaker: StoreBreaker,
        users: UserStore,
        decisions: DecisionStore,
        epochs: EpochStore,
        fusion: FusionStore,
        transfer: TransferStore,
        room: ServingRoom,
        *,
        private_folder: Path | None,
    ) -> None:
        """`private_folder` is where a Valkey of ours writes its history; None when the store is somebody else's."""
        self._live = live
        self._breaker = breaker
        self._users = users
        self._decisions = decisions
        self._epochs = epochs
        self._fusion = fusion
        self._transfer = transfer
        self._room = room
        self._profiles = ProfileStore(redis, keys)
        self._traces = Traces(redis, keys)
        self._history = History(redis, private_folder)
        self._settling: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """See to nothing any more."""
        for task in self._settling:
            task.cancel()
        await asyncio.gather(*self._settling, return_exceptions=True)
        await self._history.stop()

    async def describe(self, user_id: str, *, events: int) -> UserDescription | None:
        """What is stored of a user, with so many of the latest rewards; None when there is nothing."""
        return await self._breaker.call(lambda: self._describe(user_id, events))

    async def _describe(self, user_id: str, events: int) -> UserDescription | None:
        stored = await self._users.summary(user_id)
        window_ms = self._live.settings.reward_window_s * 1_000
        open_decisions = await self._decisions.open_of(user_id, now_ms(), window_ms=window_ms, most=DECISIONS_SHOWN)
        profile = None
        with suppress(CorruptRecord):
            profile = await self._profiles.get(user_id)
        warm_start = await self._warm_start(user_id)
        unknown = stored is None and not open_decisions and profile is None and warm_start is None
        # A decision that is too late for rewards is not shown, but it is stored.
        if unknown and not await self._decisions.keeps_any_of(user_id):
            return None
        # Somebody who has only asked so far.
        summary = stored or UserSummary(incarnation=0, version=0, epoch=None, samples=0, forgotten=False)
        serving = self._room.serving
        return UserDescription(
            stored=summary,
            resident=serving is not None and user_id in serving.replica,
            events=tuple(await self._users.latest_samples(user_id, events)),
            decisions=tuple(open_decisions),
            profile=profile,
            warm_start=warm_start,
            traces=await self._traces_of(user_id, summary) if summary.forgotten else None,
        )

    async def _warm_start(self, user_id: str) -> WarmStartView | None:
        _, starts = await self._users.load_with_starts([user_id])
        start = starts.get(user_id)
        if start is None:
            return None
        names = await self._fusion.names(token for token, _ in start.nearest)
        return WarmStartView(
            fusion_version=start.version,
            trust=float(start.values[-1]),
            created_ms=start.created_ms,
            nearest=tuple(NearUser(names.get(token), distance) for token, distance in start.nearest),
        )

    async def _traces_of(self, user_id: str, tombstone: UserSummary) -> UserTraces:
        since = tombstone.incarnation
        return UserTraces(
            decisions=await self._decisions.count_of(user_id, since),
            waiting=len(await self._traces.events(user_id, since)),
            dead_letters=await self._traces.letters(user_id, since),
            samples=tombstone.samples,
            log_lines=await self._traces.lines(user_id, since),
            pool=user_id in await self._epochs.members(),
            fusion=user_id in (await self._fusion.everyone()).values(),
            transfer=user_id in await self._transfer.named(),
        )

    async def forget(self, user_id: str) -> UserForgotten:
        """Forget a user. Whatever fails on the way, the same call again finds what is left."""
        forgotten = await self._breaker.call(lambda: self._users.forget(user_id))
        since = forgotten.incarnation
        if self._room.serving is not None:
            replica = self._room.serving.replica
            # The log would tell it in a moment; nobody who was answered finds the old state here.
            await self._breaker.call(lambda: replica.refresh(user_id))
        removed = Removed(
            samples=forgotten.samples,
            decisions=await self._breaker.call(lambda: self._decisions.forget_of(user_id, since)),
            dead_letters=await self._breaker.call(lambda: self._traces.delete_letters(user_id, since)),
            log_lines=await self._breaker.call(
                lambda: self._traces.delete_lines(user_id, since, before=forgotten.line)
            ),
        )
        await self._breaker.call(lambda: self._epochs.strike([user_id]))
        await self._breaker.call(lambda: self._fusion.strike([user_id]))
        await self._breaker.call(lambda: self._transfer.strike([user_id]))
        waiting = await self._breaker.call(lambda: self._traces.events(user_id, since))
        history: Literal["rewritten", "pending", "not ours"] = "not ours"
        if await self._breaker.call(self._history.is_ours):
            # In a context of its own: it may outlive the request.
            settling = asyncio.create_task(self._settle(user_id, waiting), context=Context())
            self._settling.add(settling)
            settling.add_done_callback(self._settled)
            done, _ = await asyncio.wait([settling], timeout=SETTLE_S)
            history = "rewritten" if done and not settling.cancelled() and not settling.exception() else "pending"
            waiting = await self._breaker.call(lambda: self._traces.events_left(user_id, waiting))
        log.info("user forgotten", decisions=removed.decisions, waiting=len(waiting), history=history)
        return UserForgotten(since, removed, len(waiting), history)

    async def _settle(self, user_id: str, waiting: list[str]) -> None:
        """Have the history rewritten once nothing waits any more: an event in the stream is in the history too."""
        pause_s = FIRST_PAUSE_S
        while waiting:
            with suppress(StoreUnavailable):
                waiting = await self._breaker.call(partial(self._traces.events_left, user_id, waiting))
            if waiting:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await self._history.rewrite()

    def _settled(self, settling: asyncio.Task[None]) -> None:
        self._settling.discard(settling)
        if not settling.cancelled() and (error := settling.exception()) is not None:
            log.error("history not rewritten", exc_info=error)
