"""Runs the suite several times, also beside busy processes and in random order, and prints a table of the runs.

`make test-loaded` and `make test-repeated` call it. It ends with 1 when any run failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import final

#: Busy processes end by themselves after this time, should the runner be killed.
BUSY_S_MAX = 3_600.0

SUMMARY = re.compile(r"(\d+ (?:passed|failed|error).*) in [\d.]+s")


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Outcome of one run."""

    seed: int | None
    code: int
    summary: str
    minutes: float


def main() -> int:
    """Run the command, print the table, return the exit code."""
    options = parse(sys.argv[1:])
    runs = []
    with busy_processes(options.busy):
        for number in range(options.runs):
            seed = None if options.seed is None else options.seed + number
            runs.append(run(options.command, seed))
            sys.stdout.write(table(runs, options.busy))
            sys.stdout.flush()
    return int(any(done.code for done in runs))


def table(runs: list[Run], busy: int) -> str:
    """The runs so far."""
    lines = [f"\nrun  seed   exit  minutes  result   ({busy} busy processes beside it)"]
    for number, done in enumerate(runs, start=1):
        order = "-" if done.seed is None else str(done.seed)
        lines.append(f"{number:3}  {order:5}  {done.code:4}  {done.minutes:7.2f}  {done.summary}")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options, and the command after `--`."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how many times (default 1)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy meanwhile (default 0)")
    parser.add_argument("--seed", type=int, help="shuffle the tests: this seed in the first run, one more in each next")
    parser.add_argument("command", nargs="+", help="command to run, after --")
    return parser.parse_args(arguments)


def run(command: list[str], seed: int | None) -> Run:
    """Run the command once; its output is shown as it comes."""
    began_s = time.monotonic()
    order = [] if seed is None else ["-p", "randomly", f"--randomly-seed={seed}"]
    summary = "no summary"
    with subprocess.Popen([*command, *order], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if match := SUMMARY.search(line):
                summary = match[1]
    return Run(seed, process.returncode, summary, (time.monotonic() - began_s) / 60)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute until the block ends."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    processes = [context.Process(target=_compute, args=(over,), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        over.set()
        for process in processes:
            process.join()


def _compute(over: Event) -> None:
    end_s = time.monotonic() + BUSY_S_MAX
    while not over.is_set() and time.monotonic() < end_s:
        sum(number * number for number in range(10_000))


if __name__ == "__main__":
    sys.exit(main())
