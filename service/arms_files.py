"""Files of arms, one JSON object a line: received, checked line by line, and only then written to the catalogue.

A file that is received has no name in its directory, so nothing of it is left behind, however this process ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, cast, final

import structlog
from pydantic_core import from_json

from models.features import FeatureError, FeatureLayout, Features, check_fit
from service.errors import BodyTimeout, CatalogueFull, InvalidInput, ServiceError, Unavailable
from service.intake import catalogue_arm, nested_too_deeply
from service.records import now_ms
from service.schemas import ArmLine
from service.settings import Settings
from store.catalogue import Arm, ArmWrite, CatalogueStore, in_batches
from store.snapshots import Progress

#: A client that sends nothing for this long is given up on, and so is one that takes longer for all of it.
SILENCE_S: Final = 30.0
UPLOAD_S: Final = 900.0
#: Bytes gathered before they are written to disk.
WRITE_BYTES: Final = 1_048_576
#: Bad lines told of; reading ends at the last of them.
BAD_LINES_TOLD: Final = 10
MAX_REASON_CHARS: Final = 200
#: Arms read at a time for an export.
EXPORT_ARMS: Final = 200
#: Lines between two words on the progress.
TELL_LINES: Final = 500

#: Characters that JSON leaves as they are, and at which many readers of lines end one.
LINE_ENDS: Final = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}

#: What becomes of arms that are not in the file: they stay, or they are removed.
ImportMode: TypeAlias = Literal["upsert", "replace"]

_log = structlog.stdlib.get_logger(__name__)


async def spool(chunks: AsyncIterable[bytes], folder: Path) -> BinaryIO:
    """What a client sends, as a file without a name."""
    try:
        file = await asyncio.to_thread(_new_file, folder)
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
        _log.error("import cannot be kept", reason=str(error))
        raise Unavailable("The file cannot be kept: METABAN_DATA_DIR has no room, or cannot be written.") from error
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
    """A received file, and what its lines have to hold."""

    file: BinaryIO
    settings: Settings
    layout: FeatureLayout | None

    def check(self, tell: Progress) -> dict[str, int]:
        """Read every line: the ids, each with the number of its line. InvalidInput tells of the first bad lines."""
        size = os.fstat(self.file.fileno()).st_size
        self.file.seek(0)
        ids: dict[str, int] = {}
        bad: list[str] = []
        first: ArmLine | None = None
        for count, (number, line) in enumerate(self._lines()):
            try:
                arm = self._arm(line)
                first = first or arm
                if self.layout is None:
                    _check_alike(arm.features, first.features)
                if (earlier := ids.setdefault(arm.id, number)) != number:
                    raise InvalidInput(("id",), f"is the id of line {earlier} too")
            except ServiceError as error:
                bad.append(f"line {number}: {error.detail[:MAX_REASON_CHARS]}")
                if len(bad) == BAD_LINES_TOLD:
                    break
            if len(ids) > self.settings.max_catalogue:
                bad.append(f"line {number}: one arm more than the catalogue may have (METABAN_MAX_CATALOGUE)")
                break
            if count % TELL_LINES == 0:
                tell("bytes read", self.file.tell(), size)
        if bad:
            raise InvalidInput((), "; ".join(bad) + ". Nothing was written.")
        if not ids:
            raise InvalidInput((), "The file holds no arms. Nothing was written.")
        return ids

    def writes(self) -> Iterator[ArmWrite]:
        """The changes that a checked file asks for."""
        self.file.seek(0)
        for _, line in self._lines():
            arm = self._arm(line)
            yield ArmWrite.put(arm.id, arm.features)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that hold something, with their numbers; of one that is too long the beginning."""
        longest = self.settings.max_body_bytes
        number = 0
        while line := self.file.readline(longest + 1):
            number += 1
            rest = line
            while len(rest) > longest and not rest.endswith(b"\n"):
                rest = self.file.readline(longest + 1)
            if line.strip():
                yield number, line

    def _arm(self, line: bytes) -> ArmLine:
        longest = self.settings.max_body_bytes
        if len(line) > longest:
            raise InvalidInput((), f"is longer than {longest} bytes (METABAN_MAX_BODY_BYTES)")
        try:
            payload: Any = from_json(line)
        except ValueError as error:
            told = nested_too_deeply(str(error)) if "recursion limit" in str(error) else f"is not JSON: {error}"
            raise InvalidInput((), told) from None
        arm = catalogue_arm(payload, ArmLine, self.settings)
        if self.layout is not None:
            try:
                check_fit(self.layout, arm.features)
            except FeatureError as error:
                raise InvalidInput(error.field, error.message) from None
        return arm


async def import_arms(store: CatalogueStore, arms: ArmFile, mode: ImportMode, tell: Progress) -> dict[str, Any]:
    """Check a file, then write it; what was done. InvalidInput and CatalogueFull mean that nothing was written."""
    ids = await asyncio.to_thread(arms.check, tell)
    both = set(await store.ids()) | ids.keys()
    count = len(ids) if mode == "replace" else len(both)
    if count > store.arms_max:
        raise CatalogueFull(
            f"The catalogue would have {count} arms and may have {store.arms_max}: remove some, or raise "
            "METABAN_MAX_CATALOGUE. Nothing was written."
        )
    written = read = removed = 0
    batches = in_batches(arms.writes())
    # What a replacement removes goes last, so that there is always something to choose from.
    most = max(store.arms_max, len(both)) if mode == "replace" else store.arms_max
    while batch := await asyncio.to_thread(next, batches, None):
        outcomes = await store.change(batch, now_ms=now_ms(), arms_max=most)
        written += sum(outcome.changed for outcome in outcomes)
        read += len(batch)
        tell("arms", read, len(ids))
    if mode == "replace":
        gone = [ArmWrite.remove(arm_id) for arm_id in await store.ids() if arm_id not in ids]
        for batch in in_batches(gone):
            outcomes = await store.change(batch, now_ms=now_ms())
            removed += sum(outcome.changed for outcome in outcomes)
            tell("arms removed", removed, len(gone))
    return {"arms": len(ids), "written": written, "unchanged": len(ids) - written, "removed": removed}


def export_line(arm: Arm) -> bytes:
    """An arm as an import takes it."""
    text = json.dumps(asdict(arm), separators=(",", ":"), ensure_ascii=False)
    return text.translate(LINE_ENDS).encode() + b"\n"


def _check_alike(features: Features, first: Features) -> None:
    """Before a first request fixes the layout: arms of two kinds could never be chosen from together."""
    if isinstance(features, dict) != isinstance(first, dict):
        raise InvalidInput(("features",), "must be a list in all lines, or an object in all of them")
    if not isinstance(features, dict) and len(features) != len(first):
        raise InvalidInput(("features",), f"has {len(features)} numbers where the first arm has {len(first)}")
