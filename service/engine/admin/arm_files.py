"""Files of arms, one JSON object per line: received, checked line by line, then written to the catalogue.

A received file has no name in its directory, so nothing is left of it when the process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, cast, final

import structlog

from metaban.models.features import FeatureError, FeatureLayout, Features, check_fit
from metaban.service.engine.commands import ArmInput
from metaban.service.errors import BodyTimeout, CatalogueFull, InvalidInput, ServiceError, Unavailable
from metaban.service.settings.environment import Settings
from metaban.store.catalogue import ArmWrite, CatalogueArm, CatalogueStore, in_batches
from metaban.store.codec import now_ms
from metaban.store.snapshots.create import Progress

#: Longest pause between two chunks of an upload.
SILENCE_S: Final = 30.0

#: Longest upload.
UPLOAD_S: Final = 900.0

#: Bytes buffered before they are written to disk.
WRITE_BYTES: Final = 1_048_576

#: Invalid lines reported; reading stops at the last of them.
BAD_LINES_REPORTED: Final = 10

MAX_REASON_CHARS: Final = 200

#: Arms read at a time for an export.
EXPORT_ARMS: Final = 200

#: Lines between two progress reports.
PROGRESS_LINES: Final = 500

#: Characters that JSON does not escape and that many line readers take for a line end.
LINE_ENDS: Final = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}

#: Whether arms that are not in the file stay or are removed.
ImportMode: TypeAlias = Literal["upsert", "replace"]

#: Parses and validates one line; InvalidInput when it cannot be used.
ParseLine: TypeAlias = Callable[[bytes], ArmInput]

_log = structlog.stdlib.get_logger(__name__)


async def spool(chunks: AsyncIterable[bytes], settings: Settings) -> BinaryIO:
    """Write an upload to a file without a name in the data directory."""
    try:
        file = await asyncio.to_thread(_new_file, settings.data_dir)
        try:
            async with asyncio.timeout(UPLOAD_S):
                await _fill(file, chunks)
        except BaseException:
            file.close()
            raise
    except TimeoutError:
        raise BodyTimeout(
            f"The body did not arrive within {UPLOAD_S:g} s, or nothing of it for {SILENCE_S:g} s."
        ) from None
    except OSError as error:
        _log.error("import_not_stored", namespace=settings.namespace, reason=str(error))
        raise Unavailable("The file cannot be stored: METABAN_DATA_DIR is full or cannot be written.") from error
    return file


def _new_file(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


async def _fill(file: BinaryIO, chunks: AsyncIterable[bytes]) -> None:
    waiting = bytearray()
    source = aiter(chunks)
    while True:
        async with asyncio.timeout(SILENCE_S):
            chunk = await anext(source, None)
        waiting += chunk or b""
        if chunk is None or len(waiting) >= WRITE_BYTES:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting.clear()
        if chunk is None:
            await asyncio.to_thread(file.seek, 0)
            return


@final
@dataclass(frozen=True, slots=True)
class ArmFile:
    """A received file and the rules for its lines."""

    file: BinaryIO
    settings: Settings
    layout: FeatureLayout | None
    parse: ParseLine

    def check(self, report: Progress) -> dict[str, int]:
        """Check every line; returns the line number of each id. InvalidInput lists the first invalid lines."""
        size = os.fstat(self.file.fileno()).st_size
        self.file.seek(0)
        ids: dict[str, int] = {}
        bad: list[str] = []
        first: ArmInput | None = None
        for count, (number, line) in enumerate(self._lines()):
            try:
                arm = self._arm(line)
                first = first or arm
                if self.layout is None:
                    _check_alike(arm.features, first.features)
                if (earlier := ids.setdefault(arm.id, number)) != number:
                    raise InvalidInput(("id",), f"is also the id of line {earlier}")
            except ServiceError as error:
                bad.append(f"line {number}: {error.detail[:MAX_REASON_CHARS]}")
                if len(bad) == BAD_LINES_REPORTED:
                    break
            if len(ids) > self.settings.max_catalogue:
                bad.append(f"line {number}: more arms than the catalogue may have (METABAN_MAX_CATALOGUE)")
                break
            if count % PROGRESS_LINES == 0:
                report("bytes read", self.file.tell(), size)
        if bad:
            raise InvalidInput((), "; ".join(bad) + ". Nothing was written.")
        if not ids:
            raise InvalidInput((), "The file holds no arms. Nothing was written.")
        return ids

    def writes(self) -> Iterator[ArmWrite]:
        """The writes of a checked file."""
        self.file.seek(0)
        for _, line in self._lines():
            arm = self._arm(line)
            yield ArmWrite.put(arm.id, arm.features)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Non-empty lines with their numbers; an overlong line is cut."""
        longest = self.settings.max_body_bytes
        number = 0
        while line := self.file.readline(longest + 1):
            number += 1
            rest = line
            while len(rest) > longest and not rest.endswith(b"\n"):
                rest = self.file.readline(longest + 1)
            if line.strip():
                yield number, line

    def _arm(self, line: bytes) -> ArmInput:
        longest = self.settings.max_body_bytes
        if len(line) > longest:
            raise InvalidInput((), f"is longer than {longest} bytes (METABAN_MAX_BODY_BYTES)")
        arm = self.parse(line)
        if self.layout is not None:
            try:
                check_fit(self.layout, arm.features)
            except FeatureError as error:
                raise InvalidInput(error.field, error.message) from None
        return arm


async def import_arms(store: CatalogueStore, arms: ArmFile, mode: ImportMode, report: Progress) -> dict[str, Any]:
    """Check a file, then write it; returns counts. After InvalidInput or CatalogueFull nothing was written."""
    ids = await asyncio.to_thread(arms.check, report)
    both = set(await store.ids()) | ids.keys()
    count = len(ids) if mode == "replace" else len(both)
    if count > store.arms_max:
        raise CatalogueFull(
            f"The catalogue would have {count} arms and may have {store.arms_max}: remove some, or raise "
            "METABAN_MAX_CATALOGUE. Nothing was written."
        )
    written = read = removed = 0
    batches = in_batches(arms.writes())
    # Removals come last, so that the catalogue is never empty.
    most = max(store.arms_max, len(both)) if mode == "replace" else store.arms_max
    while batch := await asyncio.to_thread(next, batches, None):
        outcomes = await store.change(batch, now_ms=now_ms(), arms_max=most)
        written += sum(outcome.changed for outcome in outcomes)
        read += len(batch)
        report("arms", read, len(ids))
    if mode == "replace":
        gone = [ArmWrite.remove(arm_id) for arm_id in await store.ids() if arm_id not in ids]
        for batch in in_batches(gone):
            outcomes = await store.change(batch, now_ms=now_ms())
            removed += sum(outcome.changed for outcome in outcomes)
            report("arms removed", removed, len(gone))
    return {"arms": len(ids), "written": written, "unchanged": len(ids) - written, "removed": removed}


def export_line(arm: CatalogueArm) -> bytes:
    """An arm as a line that an import accepts."""
    text = json.dumps(asdict(arm), separators=(",", ":"), ensure_ascii=False)
    return text.translate(LINE_ENDS).encode() + b"\n"


def _check_alike(features: Features, first: Features) -> None:
    """InvalidInput unless both have one kind of features; used while no request has fixed the layout."""
    if isinstance(features, dict) != isinstance(first, dict):
        raise InvalidInput(("features",), "must be a list in all lines, or an object in all of them")
    if not isinstance(features, dict) and len(features) != len(first):
        raise InvalidInput(("features",), f"has {len(features)} numbers where the first arm has {len(first)}")
