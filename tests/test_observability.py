"""Dashboard and alerts use existing metrics and labels; Prometheus' own tool can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from metaban.models.default.calibration import BINS, COLUMNS, ReliabilityTable
from metaban.service.telemetry.metrics import REJECTIONS, STAGES, Metrics
from metaban.store.users.users import COUNTERS

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "metaban.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]

SERIES = re.compile(r"\b(?:(?:metaban|process)_\w+|up)\b")
SELECTORS = re.compile(r"\b((?:metaban|process)_\w+|up)\{([^}]*)\}")
GROUPINGS = re.compile(r"\bby \(([^)]*)\)")


def expressions() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return [rule["expr"] for rule in ALERTS] + [target["expr"] for panel in panels for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """All series of a service, with their labels."""
    metrics = Metrics()
    view = metrics.of("shop")
    view.count_decision("ucb", None, replayed=False, logged=True)
    view.count_rewards(accepted=1, duplicates=0, rejected=0)
    view.set_events(dict.fromkeys(COUNTERS, 1))
    view.set_calibration(ReliabilityTable(np.full((BINS, COLUMNS), 50.0)))
    for histogram in (view.reward, view.freshness_seconds, view.batch_requests):
        histogram.observe(1)
    with view.stage("score"):
        pass
    metrics.request_seconds.labels("GET", "/", "200").observe(1)
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    return found


def check(expression: str, series: dict[str, set[str]]) -> None:
    """Check that the series of an expression are exported, with the labels that it names."""
    names = set(SERIES.findall(expression))
    assert names, expression
    assert names <= series.keys(), names - series.keys()
    for name, selector in SELECTORS.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) <= series[name], expression
    for labels in GROUPINGS.findall(expression):
        grouped = {label.strip() for label in labels.split(",")} - {"le"}
        assert any(grouped <= series[name] for name in names), expression


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_exported_series(expression: str) -> None:
    check(expression, exported())


@pytest.mark.parametrize(
    "wrong",
    ["metaban_made_up", 'metaban_ready{colour="x"}', "sum by (colour) (metaban_backlog_events)"],
)
def test_a_series_or_label_that_is_not_exported_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong, exported())


def test_promtool_accepts_alerts_and_dashboard(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, which Debian's package `prometheus` contains")
    shown = tmp_path / "dashboard.yml"
    rules = [
        {"record": f"expression:{number}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for number, expression in enumerate(expressions())
    ]
    shown.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for path in (DEPLOY / "prometheus" / "alerts.yml", shown):
        checked = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_values_of_labels_exist() -> None:
    known = {"reason": set(REJECTIONS), "stage": set(STAGES), "state": set(COUNTERS)}
    seen = 0
    for expression in expressions():
        for label, values in re.findall(r'(reason|stage|state)=~?"([^"]+)"', expression):
            assert set(values.split("|")) <= known[label], expression
            seen += 1
    assert seen >= 4


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names) >= 10
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]


def test_the_scrape_example_finds_the_rules_and_the_metrics() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("metaban", "/metrics")


def test_panels_do_not_overlap_and_have_titles() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["title"]


def test_a_deleted_namespace_is_not_shown() -> None:
    metrics = Metrics()
    for name in ("kept", "gone"):
        view = metrics.of(name)
        view.count_decision("ucb", "meta", replayed=True, logged=False)
        view.set_events({"applied": 1})
        view.set_calibration(ReliabilityTable(np.full((BINS, COLUMNS), 50.0)))
        with view.stage("score"):
            pass
    metrics.forget("gone")
    text = metrics.render()[0].decode()
    assert 'namespace="gone"' not in text
    assert 'metaban_stage_seconds_count{namespace="kept",stage="score"} 1.0' in text
    assert metrics.of("gone") is not metrics.of("kept")


def test_unknown_calibration_is_not_shown() -> None:
    metrics = Metrics()
    view = metrics.of("shop")

    def shown() -> dict[str, float]:
        found = [sample for family in metrics.registry.collect() for sample in family.samples]
        return {
            sample.name.removeprefix("metaban_calibration_"): sample.value
            for sample in found
            if sample.name.startswith("metaban_calibration_")
        }

    view.set_calibration(None)
    assert shown() == {}
    table = np.zeros((BINS, COLUMNS))
    table[3] = [40, 14, 20, 30]
    view.set_calibration(ReliabilityTable(table))
    assert shown() == {"samples": 40, "ece": pytest.approx(0.15), "coverage": 0.75}, (
        "too few samples for a largest error"
    )
    table[5] = [60, 33, 30, 54]
    view.set_calibration(ReliabilityTable(table))
    assert shown() == {"samples": 100, "ece": pytest.approx(0.09), "mce": pytest.approx(0.05), "coverage": 0.84}
    view.set_calibration(None)
    assert shown() == {}
