"""The arms of the catalogue as administrators see them: read, written, removed, imported and exported."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import closing
from typing import Any, BinaryIO, final

from models.features import FeatureError, check_fit
from service.arms_files import EXPORT_ARMS, ArmFile, ImportMode, export_line, import_arms, spool
from service.breaker import StoreBreaker
from service.contracts import Features
from service.errors import ArmExists, CatalogueFull, InvalidInput, JobRunning, VersionConflict
from service.jobs import Job, JobTable
from service.records import now_ms
from service.serving import ServingRoom
from service.settings import Settings
from store import errors as store_errors
from store.catalogue import Arm, ArmOutcome, ArmPage, ArmWrite, CatalogueStore
from store.snapshots import Progress


@final
class ArmDesk:
    """The catalogue of one served namespace."""

    def __init__(
        self, settings: Settings, breaker: StoreBreaker, store: CatalogueStore, room: ServingRoom, jobs: JobTable
    ) -> None:
        self._settings = settings
        self._breaker = breaker
        self._store = store
        self._room = room
        self._jobs = jobs
        self._receiving = False

    async def page(self, *, limit: int, cursor: str | None) -> tuple[ArmPage, int]:
        """Some arms in the order of their ids, and how many there are in all."""
        page = await self._breaker.call(lambda: self._store.page(limit=limit, cursor=cursor))
        return page, await self._breaker.call(self._store.count)

    async def get(self, arm_id: str) -> Arm | None:
        """One arm."""
        return await self._breaker.call(lambda: self._store.get(arm_id))

    async def create(self, arm_id: str, features: Features) -> Arm:
        """Add an arm; ArmExists when there is one of that id."""
        try:
            arm, _ = await self.put(arm_id, features, expected=0)
        except VersionConflict:
            raise ArmExists("is an arm of the catalogue already: change it with PUT /admin/arms/{id}") from None
        return arm

    async def put(self, arm_id: str, features: Features, *, expected: int | None) -> tuple[Arm, bool]:
        """Add an arm or change its features, if it has the expected version; and whether it is new."""
        layout = await self._breaker.call(self._room.known_layout)
        if layout is not None:
            try:
                check_fit(layout, features)
            except FeatureError as error:
                raise InvalidInput(error.field, error.message) from error
        at_ms = now_ms()
        outcome = await self._change(ArmWrite.put(arm_id, features, expected=expected), at_ms)
        if not outcome.changed and (stored := await self.get(arm_id)) is not None:
            return stored, False
        return Arm(arm_id, features, outcome.version, at_ms), not outcome.before

    async def remove(self, arm_id: str, *, expected: int | None) -> ArmOutcome:
        """Take an arm out: from the next request on it is chosen nowhere."""
        return await self._change(ArmWrite.remove(arm_id, expected=expected), now_ms())

    async def export(self) -> AsyncIterator[bytes]:
        """All arms, as lines of JSON; the first lines are there when this returns."""
        return self._export_from(await self._export_page(None))

    async def receive(self, chunks: AsyncIterable[bytes], mode: ImportMode) -> Job:
        """Take a file of arms and begin to import it; JobRunning while a job or another import is under way."""
        self._jobs.require_idle()
        if self._receiving:
            raise JobRunning("Another file is being received; wait for its import to end.")
        self._receiving = True
        try:
            file = await spool(chunks, self._settings.data_dir)
        finally:
            self._receiving = False
        try:
            return self._jobs.start("arms-import", lambda tell: self._import(file, mode, tell))
        except BaseException:
            file.close()
            raise

    async def _change(self, write: ArmWrite, at_ms: int) -> ArmOutcome:
        try:
            [outcome] = await self._breaker.call(lambda: self._store.change([write], now_ms=at_ms))
        except store_errors.CatalogueFull:
            raise CatalogueFull(
                f"The catalogue has as many arms as it may ({self._store.arms_max}): remove some, or raise "
                "METABAN_MAX_CATALOGUE."
            ) from None
        except store_errors.ArmConflict as error:
            raise VersionConflict(
                f"The arm has version {error.version}: read it again before you change it."
                if error.version
                else "There is no such arm (any more)."
            ) from None
        return outcome

    async def _export_from(self, page: ArmPage) -> AsyncIterator[bytes]:
        while True:
            yield b"".join(map(export_line, page.arms))
            if page.cursor is None:
                return
            page = await self._export_page(page.cursor)

    async def _export_page(self, cursor: str | None) -> ArmPage:
        return await self._breaker.call(lambda: self._store.page(limit=EXPORT_ARMS, cursor=cursor))

    async def _import(self, file: BinaryIO, mode: ImportMode, tell: Progress) -> dict[str, Any]:
        with closing(file):
            arms = ArmFile(file, self._settings, await self._room.known_layout())
            return await import_arms(self._store, arms, mode, tell)
