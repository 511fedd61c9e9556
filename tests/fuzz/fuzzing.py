"""Ask a running service everything that its OpenAPI document allows, and much that it does not, and hold every answer
against the document: no 500, no status, no media type and no shape that it does not speak of.

Half of the requests are made for each operation by itself, the other half follow the links of the document: a decision
is rewarded, activated and forgotten, arms and namespaces are made, used and deleted, jobs looked after.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, final

import hypothesis
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.generation.stateful import APIStateMachine
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.client import Ask, Metaban, Reward
from store.transfer import TARGET_SAMPLES_MIN

#: Numbers in the features that the fuzzer makes up.
FEATURES: Final = 3
#: Users of whom enough is learned for them to be asked about.
TEACHERS: Final = ("ann", "bo", "cem")


@st.composite
def _lines_of_arms(draw: st.DrawFn) -> bytes:
    """A file of arms, of which one line may be anything."""
    names = draw(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5, unique=True))
    lines = [json.dumps({"id": name, "features": [0.5] * FEATURES}).encode() for name in names]
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.binary(max_size=40)))
    return b"\n".join(lines)


schemathesis.openapi.media_type("application/x-ndjson", _lines_of_arms())

CHECKS: Final[list[CheckFunction]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
#: An overloaded service, or one whose store is away, says 503: that is an answer, if it is in the document.
EXPECTED: Final = ["2xx", "3xx", "4xx", "503"]
#: Requests that one scenario is made of, at most, and scenarios that are asked for at once.
STEPS: Final = 8
SCENARIOS: Final = 10
#: Longest wait for an answer; `?wait=applied` takes 5 s when nothing is learned.
ANSWER_S: Final = 30.0
#: Parts of the API whose links are followed by themselves, and all of it: among so many operations of administrators a
#: reward would hardly ever be sent.
PARTS: Final = ("^/(recommend|feedback|decisions)", "^/(recommend|feedback|admin/users|admin/groups)", "^/")
OK, CREATED, SERVER_ERROR = 200, 201, 500
#: How often the same violation is told.
TOLD_OFTEN: Final = 3


@final
@dataclass(frozen=True)
class Violation:
    """An answer that is not as the document says."""

    operation: str
    check: str
    detail: str
    reproduce: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.check}\n  {self.detail}\n  {self.reproduce}"


@final
@dataclass
class Findings:
    """What was asked, and what came of it."""

    seed: int
    #: By operation and status; status 0 is no answer at all.
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    linked: int = 0
    violations: list[Violation] = field(default_factory=list)
    #: By operation and kind; `violations` has the first few of each.
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def examples(self) -> int:
        """Requests made."""
        return self.answers.total()

    @property
    def server_errors(self) -> int:
        """Answers of a service that fell over its own feet (503 is none), and answers that never came."""
        return sum(count for (_, status), count in self.answers.items() if status in {0, SERVER_ERROR})

    def operations(self) -> dict[str, Counter[str]]:
        """By operation: how many answers of each kind there were, 5xx by number."""
        found: dict[str, Counter[str]] = {}
        for (operation, status), count in sorted(self.answers.items()):
            kind = "none" if not status else str(status) if status >= SERVER_ERROR else f"{status // 100}xx"
            found.setdefault(operation, Counter())[kind] += count
        return found

    def check(self, case: Case, response: Response) -> None:
        """Hold an answer against the document."""
        self.answers[case.operation.label, response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            curl = case.as_curl_command(headers=dict(response.request.headers))
            for failure in group.exceptions:
                self._note(case, failure, response, curl)

    def lost(self, case: Case, error: requests.RequestException) -> None:
        """No answer came."""
        self.answers[case.operation.label, 0] += 1
        self._add(case.operation.label, "no answer", repr(error), case.as_curl_command())

    def _note(self, case: Case, failure: BaseException, response: Response, curl: str) -> None:
        title = failure.title if isinstance(failure, Failure) else type(failure).__name__
        said = failure.message if isinstance(failure, Failure) else str(failure)
        body = (response.text or "")[:400]
        self._add(case.operation.label, f"{title} ({response.status_code})", f"{said}\n{body}".strip(), curl)

    def _add(self, operation: str, check: str, detail: str, curl: str) -> None:
        self.broken[operation, check] += 1
        if self.broken[operation, check] <= TOLD_OFTEN:
            self.violations.append(Violation(operation, check, detail, curl))


@final
class Mender:
    """Makes most well-formed requests meaningful, so that they come further than to the first refusal.

    The document cannot say that all features of a namespace have the same shape, that ids differ, or which namespaces
    there are. What is malformed on purpose is left as it is, and so is every fourth request.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._namespaces: set[str] = set()
        self._decisions: set[str] = set()

    def mend(self, case: Case) -> None:
        """Change a request before it is sent."""
        if (
            case.meta is None
            or case.meta.generation.mode is not GenerationMode.POSITIVE
            or self._random.random() < 0.25
        ):
            return
        if case.query and case.query.get("namespace") not in self._namespaces:
            case.query = {name: value for name, value in case.query.items() if name != "namespace"}
        if isinstance(case.body, dict):
            case.body = self._mended(case.body)
            if case.operation.label == "POST /admin/transfer":
                # No schema says that there is one target, nor of whom enough was learned.
                case.body |= {"user_id": TEACHERS[0], "sources": list(TEACHERS[1:])}
                case.body.pop("cluster", None)

    def learn(self, case: Case, response: Response) -> None:
        """Remember namespaces and decisions that were made."""
        if case.operation.label == "POST /admin/namespaces" and response.status_code == CREATED:
            self._namespaces.add(response.json()["name"])
        if case.operation.label == "POST /recommend" and response.status_code == OK:
            self._decisions.add(response.json()["decision_id"])

    def _mended(self, body: dict[str, Any]) -> dict[str, Any]:
        mended = dict(body)
        if "context" in body:
            mended["context"] = None
        if "features" in body:
            mended["features"] = self.features()
        if isinstance(body.get("arms"), list):
            mended["arms"] = [{"id": f"arm-{place}", "features": self.features()} for place in range(len(body["arms"]))]
            # The examples of the document have ids, and each is good for one decision.
            if body.get("decision_id") not in self._decisions:
                mended.pop("decision_id", None)
            mended["k"] = min(mended.get("k") or 1, max(1, len(mended["arms"])))
        if isinstance(body.get("reward"), int | float):
            mended["reward"] = abs(body["reward"]) % 1.0
        if "events" in body and body.get("decision_id") in self._decisions:
            # A link names the decision of one reward, and the request to which it was added is one of many.
            del mended["events"]
            mended["reward"] = self._random.random()
        if isinstance(body.get("requests"), list):
            mended["requests"] = [self._mended(each) if isinstance(each, dict) else each for each in body["requests"]]
        return mended

    def features(self) -> list[float]:
        """As all of the namespace are."""
        return [round(self._random.uniform(-1, 1), 3) for _ in range(FEATURES)]


def fuzz(url: str, *, examples: int, seed: int) -> Findings:
    """Make about so many requests, the same for the same seed as far as the answers are the same."""
    findings, mender = Findings(seed), Mender(seed)
    with Metaban(url) as metaban:
        # What features look like is fixed by the first request: let that not be left to chance.
        metaban.recommend("first", {"arm-0": [1.0] + [0.0] * (FEATURES - 1), "arm-1": [0.0] * FEATURES})
        _teach(metaban, mender)
    schema = _load(url)
    operations = [found.ok() for found in schema.get_all_operations()]
    each = max(1, examples // 2 // len(operations))
    with requests.Session() as session:
        for place, operation in enumerate(operations):
            _ask_alone(operation, session, findings, mender, examples=each, seed=seed + place)
        alone = findings.examples
        for place, paths in enumerate(PARTS, 1):
            until = alone + (examples - alone) * place // len(PARTS)
            part = schema.include(path_regex=paths)
            _follow_links(part, session, findings, mender, until=until, seed=seed + place)
        findings.linked = findings.examples - alone
    return findings


def _teach(metaban: Metaban, mender: Mender) -> None:
    """As many rewards of some users as it takes to ask who helps whom."""
    asks = [Ask(user, {"arm-0": mender.features()}) for user in TEACHERS for _ in range(TARGET_SAMPLES_MIN)]
    decided = [result.get().decision_id for result in metaban.recommend_batch(asks)]
    metaban.feedback_batch([Reward(decision, place % 2) for place, decision in enumerate(decided)], wait_applied=True)


def _load(url: str) -> BaseSchema:
    checks = {"not_a_server_error": {"expected-statuses": EXPECTED}}
    config = SchemathesisConfig.from_dict({"base-url": url, "checks": checks})
    return schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)


def _settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def _ask_alone(
    operation: APIOperation, session: requests.Session, findings: Findings, mender: Mender, *, examples: int, seed: int
) -> None:
    """Well-formed and malformed requests of one operation."""
    good = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    strategies = [good]
    if next(operation.iter_parameters(), None) is not None or operation.body:
        strategies.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    share = max(1, examples // len(strategies))

    for strategy in strategies:

        @hypothesis.seed(seed)
        @_settings(share)
        @hypothesis.given(case=strategy)
        def ask(case: Case) -> None:
            mender.mend(case)
            try:
                response = case.call(session=session, timeout=ANSWER_S)
            except requests.RequestException as error:
                findings.lost(case, error)
                return
            mender.learn(case, response)
            findings.check(case, response)

        ask()


def _follow_links(
    schema: BaseSchema, session: requests.Session, findings: Findings, mender: Mender, *, until: int, seed: int
) -> None:
    """Scenarios along the links of the document."""

    class Scenario(schema.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Case) -> None:
            mender.mend(case)

        def call(self, case: Case, **kwargs: Any) -> Response:
            try:
                return case.call(session=session, timeout=ANSWER_S)
            except requests.RequestException as error:
                findings.lost(case, error)
                hypothesis.reject()

        def validate_response(self, response: Response, case: Case, *args: Any, **kwargs: Any) -> None:
            mender.learn(case, response)
            findings.check(case, response)

    for number in range(until):
        if findings.examples >= until:
            break
        machine: type[APIStateMachine] = hypothesis.seed(seed + number)(Scenario)
        # What can be asked next depends on what was answered, and the same question may be answered differently the
        # second time: when hypothesis notices that it ends the run, and another one begins.
        with suppress(hypothesis.errors.Flaky):
            machine.run(settings=_settings(SCENARIOS))
