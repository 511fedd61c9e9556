"""Admin calls to a scripted server: pages, files, jobs and rare answers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from metaban.client import (
    Arm,
    AsyncMetaban,
    Calibration,
    ConnectionFailed,
    Group,
    InvalidArgument,
    Job,
    JobFailed,
    Member,
    Metaban,
    Partition,
    Progress,
    Reliability,
    ReliabilityBin,
    Stream,
    StreamTotals,
    UnexpectedAnswer,
    admin,
)
from tests.client.scripted_server import HANG_UP, Answer, ScriptedServer

ARM = {"id": "tea/1", "features": {"kind": "tea", "hot": True, "price": 2}, "version": 3, "updated_ms": 5}
ARM_READ = Arm("tea/1", {"kind": "tea", "hot": True, "price": 2.0}, 3, 5)
NUMBERS = {"id": "n", "features": [1, 2.5], "version": 1, "updated_ms": 6}
NUMBERS_READ = Arm("n", (1.0, 2.5), 1, 6)
GROUP = {
    "prediction": 0.5,
    "threshold": 0.1,
    "group_size": 2,
    "pool_size": 9,
    "sampled": False,
    "members": [{"user_id": "v", "prediction": 0.4, "distance": 0.1, "events": 7}],
}
GROUP_READ = Group(0.5, 0.1, 2, 9, False, (Member("v", 0.4, 0.1, 7),))

COUNTERS = {"enqueued": 9, "applied": 6}
WAITING = {"waiting": 3, "pending": 1, "dead_letters": 0, "oldest_age_ms": None, "counters": COUNTERS}
STREAM = {
    "totals": {**WAITING, "unowned": 1},
    "partitions": [{**WAITING, "partition": 0, "consumers": 2, "owner": None}],
}
STREAM_READ = Stream(StreamTotals(3, 1, 0, None, COUNTERS, 1), (Partition(0, 3, 1, 0, None, COUNTERS, 2, None),))

BIN = {"low": 0.4, "high": 0.5, "samples": 9, "predicted": 0.44, "reward": 0.5, "coverage": 1}
CALIBRATION = {
    "model_version": 7,
    "calibration": {"samples": 9, "ece": 0.06, "mce": None, "coverage": 1, "bins": [BIN]},
}
CALIBRATION_READ = Calibration(7, Reliability(9, 0.06, None, 1.0, (ReliabilityBin(0.4, 0.5, 9, 0.44, 0.5, 1.0),)))


def job(state: str, done: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": "j1",
        "kind": "arms-import",
        "state": state,
        "started_ms": 1,
        "finished_ms": None,
        "progress": {"doing": "arms", "done": done, "total": 4},
        "result": None,
        "error": None,
        **more,
    }


@pytest.mark.parametrize(
    ("answer", "call", "asked", "body", "expected"),
    [
        (
            Answer(200, GROUP),
            lambda m: m.admin.groups("u", arm_id="n"),
            "GET /admin/groups?user_id=u&arm_id=n&namespace=shop",
            None,
            GROUP_READ,
        ),
        (
            Answer(200, GROUP),
            lambda m: m.admin.groups("u", features=[1], context=[2], limit=5),
            "POST /admin/groups?namespace=shop",
            {"user_id": "u", "features": [1.0], "context": [2.0], "limit": 5},
            GROUP_READ,
        ),
        (Answer(200, STREAM), lambda m: m.admin.stream(), "GET /admin/stream?namespace=shop", None, STREAM_READ),
        (
            Answer(200, CALIBRATION),
            lambda m: m.admin.calibration(),
            "GET /admin/calibration?namespace=shop",
            None,
            CALIBRATION_READ,
        ),
        (
            Answer(200, {"model_version": 0, "calibration": None}),
            lambda m: m.admin.calibration(),
            "GET /admin/calibration?namespace=shop",
            None,
            Calibration(0, None),
        ),
        (
            Answer(200, {"jobs": [job("running", 1)]}),
            lambda m: m.admin.jobs.list()[0].progress,
            "GET /admin/jobs?namespace=shop",
            None,
            Progress("arms", 1, 4),
        ),
    ],
)
def test_calls(answer: Answer, call: Callable[[Metaban], Any], asked: str, body: Any, expected: Any) -> None:
    with ScriptedServer([answer]) as server, Metaban(server.url, namespace="shop") as metaban:
        assert call(metaban) == expected
    request = server.received[0]
    assert f"{request.method} {request.path}" == asked
    assert (json.loads(request.body) if request.body else None) == body


def paged(*names: str) -> Iterator[Answer]:
    for place, name in enumerate(names):
        cursor = None if place == len(names) - 1 else f"after-{name}"
        yield Answer(200, {"arms": [{**NUMBERS, "id": name}], "cursor": cursor})


def test_all_pages() -> None:
    with ScriptedServer(paged("a", "b", "c")) as server, Metaban(server.url) as metaban:
        arms = metaban.admin.arms.iterate(limit=1)
        assert next(arms).id == "a"
        assert len(server.received) == 1, "a page is asked for when it is needed"
        assert [arm.id for arm in arms] == ["b", "c"]
    assert [request.path for request in server.received] == [
        "/admin/arms?limit=1",
        "/admin/arms?limit=1&cursor=after-a",
        "/admin/arms?limit=1&cursor=after-b",
    ]


async def test_all_pages_in_asyncio() -> None:
    with ScriptedServer(paged("a", "b")) as server:
        async with AsyncMetaban(server.url) as metaban:
            assert [arm.id async for arm in metaban.admin.arms.iterate()] == ["a", "b"]
    assert len(server.received) == 2


LINES = b'{"id":"a","features":[1.0]}\n{"id":"b","features":{"kind":"tea"}}\n'


@pytest.mark.parametrize("kind", ["mapping", "iterator", "file", "open", "open for text", "a wrapped one"])
async def test_imports(tmp_path: Path, kind: str) -> None:
    arms = {"a": [1.0], "b": {"kind": "tea"}}
    path = tmp_path / "arms.ndjson"
    path.write_bytes(LINES)

    def source() -> Any:
        if kind.startswith("open"):
            return opened.enter_context(path.open("r" if "text" in kind else "rb"))
        return {"mapping": arms, "iterator": iter(arms.items()), "file": path, "a wrapped one": wrapped}[kind]

    with ExitStack() as opened, ScriptedServer([Answer(202, job("running"))]) as server:
        wrapped = opened.enter_context(tempfile.NamedTemporaryFile())
        wrapped.write(LINES)
        wrapped.seek(0)
        with Metaban(server.url) as metaban:
            assert metaban.admin.arms.import_lines(source()).id == "j1"
        wrapped.seek(0)
        async with AsyncMetaban(server.url) as waiting:
            assert (await waiting.admin.arms.import_lines(source(), mode="replace")).kind == "arms-import"
    assert [request.path for request in server.received] == [
        "/admin/arms/import?mode=upsert",
        "/admin/arms/import?mode=replace",
    ]
    assert [request.body for request in server.received] == [LINES, LINES]
    assert {request.headers["content-type"] for request in server.received} == {"application/x-ndjson"}


def test_retries_send_an_open_file_from_its_position() -> None:
    file = BytesIO(b"a line that was read\n" + LINES)
    file.readline()
    plan = admin.import_lines(file)
    assert callable(plan.content)
    assert [b"".join(plan.content()) for _ in range(2)] == [LINES, LINES]


@pytest.mark.parametrize("arms", [[("a", [1.0], 3)], [7], {"a": ["x"]}, [("a", {"price": float("nan")})]])
async def test_import_of_invalid_arms_is_refused(arms: Any) -> None:
    with ScriptedServer([Answer(202, job("running"))]) as server:
        with Metaban(server.url) as metaban, pytest.raises(InvalidArgument):
            metaban.admin.arms.import_lines(arms)
        async with AsyncMetaban(server.url) as waiting:
            with pytest.raises(InvalidArgument):
                await waiting.admin.arms.import_lines(arms)


class Endless:
    """An open file whose content is not text."""

    def read(self, size: int, /) -> Any:
        return 5

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, /) -> int:
        raise OSError("not seekable")

    def tell(self) -> int:
        raise OSError("not seekable")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    closed = BytesIO()
    closed.close()
    with ScriptedServer([Answer(202, job("running"))]) as server, Metaban(server.url) as metaban:
        for source in (closed, Endless(), tmp_path, tmp_path / "missing", Path("\0")):
            with pytest.raises(InvalidArgument, match="the file cannot be read"):
                metaban.admin.arms.import_lines(source)


def test_errors_of_the_iterator_pass_through() -> None:
    def arms() -> Iterator[tuple[str, list[float]]]:
        yield "a", [1.0]
        raise KeyError("mine")

    with (
        ScriptedServer([Answer(202, job("running"))]) as server,
        Metaban(server.url) as metaban,
        pytest.raises(KeyError, match="mine"),
    ):
        metaban.admin.arms.import_lines(arms())


def test_a_long_import_is_sent_in_pieces() -> None:
    drawn = 0

    def arms() -> Iterator[tuple[str, list[float]]]:
        nonlocal drawn
        for number in range(20_000):
            drawn += 1
            yield f"arm-{number}", [float(number)]

    with ScriptedServer([Answer(202, job("running"))]) as server, Metaban(server.url) as metaban:
        metaban.admin.arms.import_lines(arms())
    assert drawn == 20_000
    assert server.received[0].headers["transfer-encoding"] == "chunked"
    assert [json.loads(line)["id"] for line in server.received[0].body.splitlines()][-1] == "arm-19999"


def test_an_import_is_not_repeated() -> None:
    with ScriptedServer([HANG_UP]) as server, Metaban(server.url) as metaban, pytest.raises(ConnectionFailed) as caught:
        metaban.admin.arms.import_lines({"a": [1.0]})
    assert caught.value.sent
    assert len(server.received) == 1


def lines(*arms: Any) -> bytes:
    return b"".join(json.dumps(arm).encode() + b"\n" for arm in arms)


async def test_exports() -> None:
    with ScriptedServer([Answer(200, lines(ARM, NUMBERS))]) as server:
        with Metaban(server.url) as metaban:
            assert list(metaban.admin.arms.export()) == [ARM_READ, NUMBERS_READ]
        async with AsyncMetaban(server.url) as waiting:
            assert await read_all(waiting.admin.arms.export()) == [ARM_READ, NUMBERS_READ]
    assert server.received[0].path == "/admin/arms/export"


async def test_only_line_feeds_end_a_line() -> None:
    """The service does not escape other Unicode line separators."""
    names = ["a\u2028b", "c\u0085d", "e\x1cf", "g\rh"]
    written = "".join(json.dumps({**NUMBERS, "id": name}, ensure_ascii=False) + "\n" for name in names[:2]).encode()
    with ScriptedServer(
        [Answer(200, written + lines(*({**NUMBERS, "id": name} for name in names[2:])).rstrip())]
    ) as server:
        with Metaban(server.url) as metaban:
            assert [arm.id for arm in metaban.admin.arms.export()] == names
        async with AsyncMetaban(server.url) as waiting:
            assert [arm.id for arm in await read_all(waiting.admin.arms.export())] == names


async def read_all(arms: AsyncIterator[Arm]) -> list[Arm]:
    return [arm async for arm in arms]


async def test_truncated_export_raises() -> None:
    cut = Answer(200, lines(ARM), {"Content-Length": "100000", "Connection": "close"})
    with ScriptedServer([cut]) as server:
        with Metaban(server.url) as metaban:
            arms = metaban.admin.arms.export()
            assert next(arms) == ARM_READ
            with pytest.raises(ConnectionFailed, match="broke off"):
                next(arms)
        async with AsyncMetaban(server.url) as waiting:
            with pytest.raises(ConnectionFailed, match="broke off"):
                await read_all(waiting.admin.arms.export())


def test_export_of_invalid_lines_raises() -> None:
    message = "`id` of the answer is not of type str"
    with ScriptedServer([Answer(200, b'{"id": 1}\n')]) as server, Metaban(server.url) as metaban:
        arms = metaban.admin.arms.export()
        with pytest.raises(UnexpectedAnswer, match=message):
            next(arms)


async def test_waiting_for_a_job() -> None:
    said = [Answer(200, job("running", 1)), Answer(503), Answer(200, job("running", 3)), Answer(200, job("done", 4))]
    with ScriptedServer(said) as server, Metaban(server.url) as metaban:
        seen: list[Job] = []
        assert metaban.admin.wait_for_job("j1", on_progress=seen.append).state == "done"
    assert [job.progress.done for job in seen] == [1, 3, 4]
    with ScriptedServer(said) as server:
        async with AsyncMetaban(server.url) as waiting:
            assert (await waiting.admin.wait_for_job("j1")).progress.done == 4


def test_failed_and_slow_jobs_raise() -> None:
    with (
        ScriptedServer([Answer(200, job("failed", error="line 3 is not JSON"))]) as server,
        Metaban(server.url) as metaban,
    ):
        with pytest.raises(JobFailed, match="line 3 is not JSON") as caught:
            metaban.admin.wait_for_job("j1")
        assert caught.value.job_id == "j1"
    with ScriptedServer([Answer(200, job("running"))]) as server, Metaban(server.url) as metaban:
        with pytest.raises(JobFailed, match=r"not done after 0\.01 s; it continues"):
            metaban.admin.wait_for_job("j1", timeout_s=0.01)
        assert len(server.received) == 1
