"""Hostile clients, each in short: refused as they should be, while everyone else is answered and memory stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.attacks import ATTACKS
from bench.hostile import GROWTH_LIMIT_MIB, HostilePlan, measure_hostile, print_hostile
from service.gate import BODY_GRACE_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc, on Linux")

#: These get no answer within the time of a test: they are only held out against.
UNANSWERED = {"deaf readers"}


@pytest.mark.parametrize(
    ("attacks", "turn_s"),
    [
        (tuple(name for name in ATTACKS if name != "500 trickling"), 1.0),
        (("500 trickling",), BODY_GRACE_S + 3.0),  # given up on when that is over
    ],
    ids=["all", "trickling"],
)
def test_others_are_answered_and_attackers_refused(tmp_path: Path, attacks: tuple[str, ...], turn_s: float) -> None:
    plan = HostilePlan(attacks=attacks, rate=20.0, turns=1, turn_s=turn_s, users=5)
    console = Console(record=True, width=160)
    report = measure_hostile(plan, quick=True, console=console)
    print_hostile(report, console)
    report.write(tmp_path / "hostile.json")
    found = json.loads((tmp_path / "hostile.json").read_text())
    assert set(found["results"]["attacks"]) == set(attacks)
    for name, row in found["results"]["attacks"].items():
        assert row["failed"] == 0, name
        assert row["attacked"]["requests"] == row["quiet"]["requests"] == round(20 * turn_s)
        assert row["outcomes"] or name in UNANSWERED, name
        assert row["unexpected"] == [], (name, row["outcomes"])
    assert found["results"]["growth_mib"] < GROWTH_LIMIT_MIB
    if "wrong keys" in attacks:
        assert set(found["results"]["attacks"]["wrong keys"]["outcomes"]) == {"401", "429"}
    for bar in found["bars"]:
        assert bar["holds"] == (bar["value"] <= bar["limit"])
    assert len(found["bars"]) == len(attacks) + 2
    assert attacks[0] in console.export_text()
