"""Admin: show and forget users."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Final, Literal, final

import structlog

from metaban.service.engine.commands import (
    RemovedRecords,
    UserDescription,
    UserForgotten,
    UserRemnants,
    WarmStartSource,
    WarmStartView,
)
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.settings.namespace import LiveSettings
from metaban.store.client.connection import Store
from metaban.store.codec import now_ms
from metaban.store.decisions.decisions import DecisionStore
from metaban.store.errors import CorruptRecord, StoreUnavailable
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.epochs import EpochStore
from metaban.store.shared.fusion import FusionStore
from metaban.store.shared.transfer import TransferStore
from metaban.store.users.forgetting import RemnantStore
from metaban.store.users.profiles import ProfileStore
from metaban.store.users.records import UserSummary
from metaban.store.users.users import UserStore
from metaban.store.valkey.aof_rewrite import AofRewriter

#: Latest decisions of a user that are looked at.
DECISIONS_LISTED: Final = 100

#: How long forgetting a user waits for workers to void waiting events and for the append-only file of a private Valkey
#: to be rewritten. Both go on afterwards.
SETTLE_S: Final = 5.0

#: Pauses between two checks of the waiting events; workers may be down for long.
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0

log = structlog.get_logger()


@final
class UserAdmin:
    """Shows and forgets the users of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        redis: Store,
        keys: NamespaceKeys,
        guard: StoreGuard,
        users: UserStore,
        decisions: DecisionStore,
        epochs: EpochStore,
        fusion: FusionStore,
        transfer: TransferStore,
        host: ModelHost,
        *,
        private_folder: Path | None,
    ) -> None:
        """`private_folder` has the append-only file of the private Valkey; None for an external store."""
        self._live = live
        self._guard = guard
        self._users = users
        self._decisions = decisions
        self._epochs = epochs
        self._fusion = fusion
        self._transfer = transfer
        self._host = host
        self._profiles = ProfileStore(redis, keys)
        self._remnants = RemnantStore(redis, keys)
        self._history = AofRewriter(redis, private_folder)
        self._rewriting: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Cancel the background tasks."""
        for task in self._rewriting:
            task.cancel()
        await asyncio.gather(*self._rewriting, return_exceptions=True)
        await self._history.stop()

    async def describe(self, user_id: str, *, events: int = 0) -> UserDescription | None:
        """What is stored about a user, with the latest `events` rewards; None when there is nothing."""
        return await self._guard.call(lambda: self._describe(user_id, events))

    async def _describe(self, user_id: str, events: int) -> UserDescription | None:
        stored = await self._users.summary(user_id)
        window_ms = round(self._live.rules.window_s * 1_000)
        open_decisions = await self._decisions.open_of(user_id, now_ms(), window_ms=window_ms, most=DECISIONS_LISTED)
        profile = None
        with suppress(CorruptRecord):
            profile = await self._profiles.get(user_id)
        warm_start = await self._warm_start(user_id)
        unknown = stored is None and not open_decisions and profile is None and warm_start is None
        # A decision past its reward window is not listed, but still stored.
        if unknown and not await self._decisions.keeps_any_of(user_id):
            return None
        # A user with decisions and no rewards has no record.
        summary = stored or UserSummary(incarnation=0, version=0, epoch=None, samples=0, forgotten=False)
        serving = self._host.serving
        return UserDescription(
            stored=summary,
            resident=serving is not None and user_id in serving.model,
            events=tuple(await self._users.latest_samples(user_id, events)),
            decisions=tuple(open_decisions),
            profile=profile,
            warm_start=warm_start,
            remnants=await self._remnants_of(user_id, summary) if summary.forgotten else None,
        )

    async def _warm_start(self, user_id: str) -> WarmStartView | None:
        _, starts = await self._users.load_with_warm_starts([user_id])
        start = starts.get(user_id)
        if start is None:
            return None
        names = await self._fusion.names(token for token, _ in start.nearest)
        return WarmStartView(
            fusion_version=start.version,
            trust=float(start.values[-1]),
            created_ms=start.created_ms,
            nearest=tuple(WarmStartSource(names.get(token), distance) for token, distance in start.nearest),
        )

    async def _remnants_of(self, user_id: str, tombstone: UserSummary) -> UserRemnants:
        since = tombstone.incarnation
        return UserRemnants(
            decisions=await self._decisions.count_of(user_id, since),
            waiting=len(await self._remnants.events(user_id, since)),
            dead_letters=await self._remnants.letters(user_id, since),
            samples=tombstone.samples,
            log_lines=await self._remnants.lines(user_id, since),
            pool=user_id in await self._epochs.members(),
            fusion=user_id in (await self._fusion.everyone()).values(),
            transfer=user_id in await self._transfer.named(),
        )

    async def forget(self, user_id: str) -> UserForgotten:
        """Forget a user. After a failure, the same call continues with what is left."""
        forgotten = await self._guard.call(lambda: self._users.forget(user_id))
        since = forgotten.incarnation
        if self._host.serving is not None:
            replica = self._host.serving.replica
            # Do not wait for the update log: after the answer, this process must not serve the old state.
            await self._guard.call(lambda: replica.refresh(user_id))
        removed = RemovedRecords(
            samples=forgotten.samples,
            decisions=await self._guard.call(lambda: self._decisions.forget_of(user_id, since)),
            dead_letters=await self._guard.call(
                lambda: self._remnants.delete_letters(self._users.partition_of(user_id), {user_id: since})
            ),
            log_lines=await self._guard.call(
                lambda: self._remnants.delete_lines(user_id, since, before=forgotten.line)
            ),
        )
        await self._guard.call(lambda: self._epochs.strike([user_id]))
        await self._guard.call(lambda: self._fusion.strike([user_id]))
        await self._guard.call(lambda: self._transfer.strike([user_id]))
        waiting = await self._guard.call(lambda: self._remnants.events(user_id, since))
        history: Literal["rewritten", "pending", "not ours"] = "not ours"
        if await self._guard.call(self._history.is_ours):
            # An empty context: it may outlive the request.
            rewriting = asyncio.create_task(self._rewrite_history(user_id, waiting), context=Context())
            self._rewriting.add(rewriting)
            rewriting.add_done_callback(self._rewritten)
            done, _ = await asyncio.wait([rewriting], timeout=SETTLE_S)
            history = "rewritten" if done and not rewriting.cancelled() and not rewriting.exception() else "pending"
            waiting = await self._guard.call(lambda: self._remnants.events_left(user_id, waiting))
        log.info(
            "user_forgotten",
            namespace=self._live.record.name,
            decisions=removed.decisions,
            waiting=len(waiting),
            history=history,
        )
        return UserForgotten(since, removed, len(waiting), history)

    async def _rewrite_history(self, user_id: str, waiting: list[str]) -> None:
        """Rewrite the append-only file once no event waits: waiting events are in the file too."""
        pause_s = FIRST_PAUSE_S
        while waiting:
            with suppress(StoreUnavailable):
                waiting = await self._guard.call(partial(self._remnants.events_left, user_id, waiting))
            if waiting:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await self._history.rewrite()

    def _rewritten(self, rewriting: asyncio.Task[None]) -> None:
        self._rewriting.discard(rewriting)
        if not rewriting.cancelled() and (error := rewriting.exception()) is not None:
            log.error("history_rewrite_failed", namespace=self._live.record.name, exc_info=error)
