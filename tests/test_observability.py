"""Dashboard and alerts ask for metrics that exist, with labels that they have, in expressions that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from models.calibration import BINS, COLUMNS, Reliability
from service.metrics import REJECTIONS, STAGES, Metrics
from store.users import COUNTERS

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "metaban.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]

#: What these files use of PromQL: functions that take a range, others, and words of the language.
RANGE_FUNCTIONS = {"rate", "increase"}
FUNCTIONS = RANGE_FUNCTIONS | {"sum", "max", "histogram_quantile", "time"}
WORDS = {"by"}
TOKEN = re.compile(
    r"""\s*(?:(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<text>"(?:[^"\\]|\\.)*")|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>=~|!=|==|>=|<=|[-+*/<>=(){},]))""",
    re.VERBOSE,
)
CLOSING = {"(": ")", "{": "}"}


def expressions() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    return [rule["expr"] for rule in ALERTS] + [target["expr"] for panel in panels for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """Every series of a service, with the labels that it has."""
    metrics = Metrics()
    view = metrics.of("shop")
    view.count_decision("ucb", None, replayed=False, logged=True)
    view.count_rewards(accepted=1, duplicates=0, rejected=0)
    view.set_events(dict.fromkeys(COUNTERS, 1))
    view.set_calibration(Reliability(np.full((BINS, COLUMNS), 50.0)))
    view.reward.observe(1)
    metrics.request_seconds.labels("GET", "/", "200").observe(1)
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    return found


def tokens(expression: str) -> list[tuple[str, str]]:
    found, place = [], 0
    text = expression.strip()
    while place < len(text):
        match = TOKEN.match(text, place)
        assert match is not None, f"cannot read {text[place:]!r}"
        found.append((str(match.lastgroup), match[str(match.lastgroup)]))
        place = match.end()
    return found


def check(expression: str, series: dict[str, set[str]]) -> None:
    """Hold an expression against the grammar, as far as these files use it, and against what is exported."""
    found = tokens(expression)
    open_signs: list[str] = []
    metric, grouping = "", False
    for (kind, text), (_, following) in zip(found, [*found[1:], ("", "")], strict=True):
        if text in CLOSING:
            open_signs.append(CLOSING[text])
        elif text in CLOSING.values():
            assert open_signs, f"{text} closes nothing"
            assert open_signs.pop() == text
            grouping = False if text == ")" else grouping
        if kind != "name":
            continue
        if following in {"(", *WORDS} and text not in WORDS:
            assert text in FUNCTIONS, text
        elif text in WORDS:
            grouping = True
        elif open_signs and (open_signs[-1] == "}" or grouping):
            assert not metric or grouping or text in series[metric], f"{metric} has no {text}"
            assert any(text in labels for labels in series.values()), text
        else:
            assert text in series, f"{text} is not exported"
            metric = text
    assert not open_signs
    for function in RANGE_FUNCTIONS:
        assert len(re.findall(rf"\b{function}\(", expression)) == len(
            re.findall(rf"\b{function}\([\w:]+({{[^}}]*}})?\[[^\]]+\]\)", expression)
        ), f"{function} needs a range"


@pytest.mark.parametrize("expression", expressions())
def test_expressions_can_be_read_and_answered(expression: str) -> None:
    check(expression, exported())


@pytest.mark.parametrize(
    "wrong",
    [
        "metaban_made_up",
        "sum(metaban_ready",
        'metaban_ready{namespace="x"}',
        "rate(metaban_rewards_total)",
        "rates(metaban_rewards_total[5m])",
        "sum by (colour) (metaban_backlog_events)",
        "metaban_ready ? 1",
        "rate(metaban_rewards_total[5x])",
    ],
)
def test_an_expression_that_is_wrong_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong, exported())


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


def test_a_namespace_that_is_gone_is_not_shown() -> None:
    metrics = Metrics()
    for name in ("kept", "gone"):
        view = metrics.of(name)
        view.count_decision("ucb", "meta", replayed=True, logged=False)
        view.set_events({"applied": 1})
        view.set_calibration(Reliability(np.full((BINS, COLUMNS), 50.0)))
        with view.stage("score"):
            pass
    metrics.forget("gone")
    text = metrics.render()[0].decode()
    assert 'namespace="gone"' not in text
    assert 'metaban_stage_seconds_count{namespace="kept",stage="score"} 1.0' in text
    assert metrics.of("gone") is not metrics.of("kept")


def test_calibration_that_is_not_known_is_not_shown() -> None:
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
    view.set_calibration(Reliability(table))
    assert shown() == {"samples": 40, "ece": pytest.approx(0.15), "coverage": 0.75}, "too few for a largest error"
    table[5] = [60, 33, 30, 54]
    view.set_calibration(Reliability(table))
    assert shown() == {"samples": 100, "ece": pytest.approx(0.09), "mce": pytest.approx(0.05), "coverage": 0.84}
    view.set_calibration(None)
    assert shown() == {}
