"""Admin: read, write, remove, import and export the arms of the catalogue."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import closing
from typing import Any, BinaryIO, final

from metaban.models.features import FeatureError, check_fit
from metaban.service.engine.admin.arm_files import (
    EXPORT_ARMS,
    ArmFile,
    ImportMode,
    ParseLine,
    export_line,
    import_arms,
    spool,
)
from metaban.service.engine.admin.jobs import JobTable, ProcessJob
from metaban.service.engine.commands import Features
from metaban.service.engine.model.lifecycle import ModelHost
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.errors import ArmExists, CatalogueFull, InvalidInput, JobRunning, VersionConflict
from metaban.service.settings.environment import Settings
from metaban.store.catalogue import ArmOutcome, ArmPage, ArmWrite, CatalogueArm, CatalogueStore
from metaban.store.codec import now_ms
from metaban.store.errors import ArmConflict, ArmLimitExceeded
from metaban.store.snapshots.create import Progress


@final
class ArmAdmin:
    """The catalogue of one served namespace."""

    def __init__(
        self, settings: Settings, guard: StoreGuard, store: CatalogueStore, host: ModelHost, jobs: JobTable
    ) -> None:
        self._settings = settings
        self._guard = guard
        self._store = store
        self._host = host
        self._jobs = jobs
        self._receiving = False

    async def page(self, *, limit: int, cursor: str | None) -> tuple[ArmPage, int]:
        """A page of arms, sorted by id, and the number of all arms."""
        page = await self._guard.call(lambda: self._store.page(limit=limit, cursor=cursor))
        return page, await self._guard.call(self._store.count)

    async def get(self, arm_id: str) -> CatalogueArm | None:
        """One arm."""
        return await self._guard.call(lambda: self._store.get(arm_id))

    async def create(self, arm_id: str, features: Features) -> CatalogueArm:
        """Add an arm; ArmExists when there is one with that id."""
        try:
            arm, _ = await self.put(arm_id, features, expected=0)
        except VersionConflict:
            raise ArmExists("is already an arm of the catalogue: change it with PUT /admin/arms/{id}") from None
        return arm

    async def put(self, arm_id: str, features: Features, *, expected: int | None) -> tuple[CatalogueArm, bool]:
        """Add an arm or change its features if it has the expected version; returns the arm and whether it is new."""
        layout = await self._guard.call(self._host.known_layout)
        if layout is not None:
            try:
                check_fit(layout, features)
            except FeatureError as error:
                raise InvalidInput(error.field, error.message) from error
        at_ms = now_ms()
        outcome = await self._change(ArmWrite.put(arm_id, features, expected=expected), at_ms)
        if not outcome.changed and (stored := await self.get(arm_id)) is not None:
            return stored, False
        return CatalogueArm(arm_id, features, outcome.version, at_ms), not outcome.before

    async def remove(self, arm_id: str, *, expected: int | None) -> ArmOutcome:
        """Remove an arm: from the next request on it is not chosen anywhere."""
        return await self._change(ArmWrite.remove(arm_id, expected=expected), now_ms())

    async def export(self) -> AsyncIterator[bytes]:
        """All arms as lines of JSON; the first page has been read when this returns."""
        return self._export_from(await self._export_page(None))

    async def receive(self, chunks: AsyncIterable[bytes], mode: ImportMode, parse: ParseLine) -> ProcessJob:
        """Receive a file of arms and start its import; JobRunning while another job or import runs.

        `parse` turns a line into an arm, or raises InvalidInput.
        """
        self._jobs.require_idle()
        if self._receiving:
            raise JobRunning("Another file is being received; wait until its import has ended.")
        self._receiving = True
        try:
            file = await spool(chunks, self._settings)
        finally:
            self._receiving = False
        try:
            return self._jobs.start("arms-import", lambda report: self._import(file, mode, parse, report))
        except BaseException:
            file.close()
            raise

    async def _change(self, write: ArmWrite, at_ms: int) -> ArmOutcome:
        try:
            [outcome] = await self._guard.call(lambda: self._store.change([write], now_ms=at_ms))
        except ArmLimitExceeded:
            raise CatalogueFull(
                f"The catalogue is full ({self._store.arms_max} arms): remove some, or raise METABAN_MAX_CATALOGUE."
            ) from None
        except ArmConflict as error:
            raise VersionConflict(
                f"The arm has version {error.version}: read it again before you change it."
                if error.version
                else "There is no such arm, or it was removed."
            ) from None
        return outcome

    async def _export_from(self, page: ArmPage) -> AsyncIterator[bytes]:
        while True:
            yield b"".join(map(export_line, page.arms))
            if page.cursor is None:
                return
            page = await self._export_page(page.cursor)

    async def _export_page(self, cursor: str | None) -> ArmPage:
        return await self._guard.call(lambda: self._store.page(limit=EXPORT_ARMS, cursor=cursor))

    async def _import(self, file: BinaryIO, mode: ImportMode, parse: ParseLine, report: Progress) -> dict[str, Any]:
        with closing(file):
            arms = ArmFile(file, self._settings, await self._host.known_layout(), parse)
            return await import_arms(self._store, arms, mode, report)
