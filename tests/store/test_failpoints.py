"""Failpoints: parsed strictly; the process ends at the right pass."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from metaban.store.failpoints import armed, parse_failpoints, reach


def test_names_and_counts_are_parsed() -> None:
    assert parse_failpoints("") == {}
    assert parse_failpoints("a=1, b:arm=7=3,") == {"a": 1, "b:arm=7": 3}


@pytest.mark.parametrize("text", ["a", "a=", "a=0", "a=-1", "=1", "a=x"])
def test_unknown_failpoints_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="place=times"):
        parse_failpoints(text)


def test_failpoints_that_are_not_armed_do_nothing() -> None:
    assert not armed()
    reach("anywhere")
    left = {"elsewhere": 1, "here": 3, "here:other": 1}
    reach("here", "mine", left=left)
    reach("here", left=left)
    assert left == {"elsewhere": 1, "here": 1, "here:other": 1}


@pytest.mark.parametrize("armed_with", ["here=2", "here:mine=2"])
def test_the_process_ends_at_the_given_pass(armed_with: str) -> None:
    program = (
        "from metaban.store.failpoints import reach\n"
        "for number in range(3):\n"
        "    print(number, flush=True)\n"
        "    reach('here', 'mine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"METABAN_FAILPOINTS": armed_with, "PYTHONPATH": "."},
    )
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])
