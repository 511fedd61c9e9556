"""Hostile clients are refused while other clients are answered and memory does not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from metaban.bench.serving.attacks import ATTACKS
from metaban.bench.serving.hostile import GROWTH_LIMIT_MIB, HostilePlan, measure_hostile, print_hostile
from metaban.service.http.admission import BODY_GRACE_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc, on Linux")

#: These get no answer within the time of a test; the service only has to withstand them.
UNANSWERED = {"deaf readers", "2,300 idle sockets"}


@pytest.mark.parametrize(
    ("attacks", "turn_s"),
    [
        (tuple(name for name in ATTACKS if name not in {"500 trickling", "2,300 idle sockets"}), 1.0),
        (("500 trickling",), BODY_GRACE_S + 3.0),  # aborted after this time
    ],
    ids=["all", "trickling"],
)
@pytest.mark.slow
def test_normal_clients_are_answered_and_attackers_refused(
    tmp_path: Path, attacks: tuple[str, ...], turn_s: float
) -> None:
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
    assert len(found["bars"]) == len(attacks) + 2
    assert attacks[0] in console.export_text()
