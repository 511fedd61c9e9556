"""The store's append-only file, cut at any byte."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.chaos.clients import SentEvents
from tests.chaos.deployment import Valkey, wait_until
from tests.chaos.run import Run
from tests.chaos.store_audit import consistency, read_store

#: Last bytes that are all tried in a long run.
TAIL_BYTES = 1_024
#: Last bytes from which further cuts are drawn; they hold many commands.
WIDER_BYTES = 256 * 1_024
#: Cuts of either kind in a short run.
SHORT_CUTS = 16
#: A run of at least this many seconds is long; a start takes about 50 ms.
LONG_S = 20.0


def cut_file(run: Run) -> None:
    """The append-only file cut at each of its last bytes: the store starts, and no update is half applied."""
    sent = SentEvents()
    with run.deployment(workers=1) as deployment:
        deployment.start()
        with run.load(deployment, sent):
            wait_until(lambda: len(sent.acknowledged()) > 150, "there is something to lose")
            deployment.valkey.kill()
            source = deployment.folder / "whole"
            shutil.copytree(deployment.valkey.data, source)
            deployment.valkey.start()
        states, most, least = _cut(run, source, deployment.folder / "cut")
        run.audit_store(deployment, sent)
    run.note(f"{run.row.kills} boots, {states} different states, of {least} to {most} events applied")


def _cut(run: Run, source: Path, folder: Path) -> tuple[int, int, int]:
    [log] = source.glob("appendonlydir/*.incr.aof")
    content = log.read_bytes()
    long = run.seconds >= LONG_S
    tail = range(max(0, len(content) - TAIL_BYTES), len(content) + 1)
    wider = range(max(0, len(content) - WIDER_BYTES), len(content))
    drawn = run.rng.sample(wider, min(len(wider), SHORT_CUTS if not long else 10 * SHORT_CUTS))
    places = [*(tail if long else run.rng.sample(tail, SHORT_CUTS)), *drawn]
    seen = set()
    for place in places:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copytree(source, folder / "valkey")
        (folder / "valkey" / log.relative_to(source)).write_bytes(content[:place])
        valkey = Valkey(folder, "everysec")
        try:
            valkey.start()
            contents = read_store(valkey.client)
            problems = [*contents.problems, *consistency(contents)]
            run.row.problems += [f"cut at byte {place} of {len(content)}: {problem}" for problem in problems]
            seen.add((contents.counters.get("enqueued", 0), contents.counters.get("applied", 0)))
        finally:
            valkey.close()
        run.row.kills += 1
    return len(seen), max(applied for _, applied in seen), min(applied for _, applied in seen)
