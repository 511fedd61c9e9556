"""Sends valid and invalid requests to a running service and checks every answer against its OpenAPI document.

An answer is wrong if it is a 500 or has a status, media type or schema that the document does not list. Half of the
requests test each operation alone; the other half follow the links of the document, for example from a decision to its
reward.
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

from metaban.client import Ask, Metaban, Reward
from metaban.store.shared.transfer import TARGET_SAMPLES_MIN

#: Length of generated features.
FEATURES: Final = 3
#: Users with enough rewards for a transfer job.
LEARNED_USERS: Final = ("ann", "bo", "cem")


@st.composite
def _lines_of_arms(draw: st.DrawFn) -> bytes:
    """A file of arms; one line may be random bytes."""
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
#: 503 is valid: an overloaded service, or one without its store, answers with it.
EXPECTED: Final = ["2xx", "3xx", "4xx", "503"]
#: Most requests of one scenario, and scenarios per run of hypothesis.
STEPS: Final = 8
SCENARIOS: Final = 10
#: Longest wait for an answer; `?wait=applied` takes 5 s when nothing is applied.
ANSWER_S: Final = 60.0
#: Parts of the API whose links are followed; the last is all of it, in which rewards would be rare.
PARTS: Final = ("^/(recommend|feedback|decisions)", "^/(recommend|feedback|admin/users|admin/groups)", "^/")
OK, CREATED, SERVER_ERROR = 200, 201, 500
#: How often the same violation is reported.
REPORTS_MAX: Final = 3


@final
@dataclass(frozen=True)
class Violation:
    """An answer that violates the document."""

    operation: str
    check: str
    detail: str
    reproduce: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.check}\n  {self.detail}\n  {self.reproduce}"


@final
@dataclass
class Findings:
    """Requests, answers and violations."""

    seed: int
    #: By operation and status; status 0 means no answer.
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    linked: int = 0
    violations: list[Violation] = field(default_factory=list)
    #: By operation and kind; `violations` has the first few of each.
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def examples(self) -> int:
        """Number of requests."""
        return self.answers.total()

    @property
    def server_errors(self) -> int:
        """Number of server errors (other than 503) and of missing answers."""
        return sum(count for (_, status), count in self.answers.items() if status in {0, SERVER_ERROR})

    def operations(self) -> dict[str, Counter[str]]:
        """Number of answers by operation and status class; 5xx by status."""
        found: dict[str, Counter[str]] = {}
        for (operation, status), count in sorted(self.answers.items()):
            kind = "none" if not status else str(status) if status >= SERVER_ERROR else f"{status // 100}xx"
            found.setdefault(operation, Counter())[kind] += count
        return found

    def check(self, case: Case, response: Response) -> None:
        """Check an answer against the document."""
        self.answers[case.operation.label, response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            curl = case.as_curl_command(headers=dict(response.request.headers))
            for failure in group.exceptions:
                self._note(case, failure, response, curl)

    def lost(self, case: Case, error: requests.RequestException) -> None:
        """Record a request without an answer."""
        self.answers[case.operation.label, 0] += 1
        self._add(case.operation.label, "no answer", repr(error), case.as_curl_command())

    def _note(self, case: Case, failure: BaseException, response: Response, curl: str) -> None:
        title = failure.title if isinstance(failure, Failure) else type(failure).__name__
        said = failure.message if isinstance(failure, Failure) else str(failure)
        body = (response.text or "")[:400]
        self._add(case.operation.label, f"{title} ({response.status_code})", f"{said}\n{body}".strip(), curl)

    def _add(self, operation: str, check: str, detail: str, curl: str) -> None:
        self.broken[operation, check] += 1
        if self.broken[operation, check] <= REPORTS_MAX:
            self.violations.append(Violation(operation, check, detail, curl))


@final
class Mender:
    """Changes most valid requests so that the service accepts them.

    A schema cannot say that all features of a namespace have the same length, that ids are unique, or which namespaces
    exist. Requests that are invalid on purpose stay unchanged, and so does every fourth valid one.
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
                # The schema does not say that there is exactly one target, or which users have enough rewards.
                case.body |= {"user_id": LEARNED_USERS[0], "sources": list(LEARNED_USERS[1:])}
                case.body.pop("cluster", None)

    def learn(self, case: Case, response: Response) -> None:
        """Remember created namespaces and decisions."""
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
            # An id of the examples is valid for one decision only.
            if body.get("decision_id") not in self._decisions:
                mended.pop("decision_id", None)
            mended["k"] = min(mended.get("k") or 1, max(1, len(mended["arms"])))
        if isinstance(body.get("reward"), int | float):
            mended["reward"] = abs(body["reward"]) % 1.0
        if "events" in body and body.get("decision_id") in self._decisions:
            # A link adds the decision_id of a single reward, which excludes `events`.
            del mended["events"]
            mended["reward"] = self._random.random()
        if isinstance(body.get("requests"), list):
            mended["requests"] = [self._mended(each) if isinstance(each, dict) else each for each in body["requests"]]
        return mended

    def features(self) -> list[float]:
        """Features of the length that the namespace expects."""
        return [round(self._random.uniform(-1, 1), 3) for _ in range(FEATURES)]


def fuzz(url: str, *, examples: int, seed: int) -> Findings:
    """Send about `examples` requests; the same seed gives the same requests as long as the answers are the same."""
    findings, mender = Findings(seed), Mender(seed)
    with Metaban(url) as metaban:
        # The first request fixes the feature layout.
        metaban.recommend("first", {"arm-0": [1.0] + [0.0] * (FEATURES - 1), "arm-1": [0.0] * FEATURES})
        _send_rewards(metaban, mender)
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


def _send_rewards(metaban: Metaban, mender: Mender) -> None:
    """Send the rewards that a transfer job needs."""
    asks = [Ask(user, {"arm-0": mender.features()}) for user in LEARNED_USERS for _ in range(TARGET_SAMPLES_MIN)]
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
    """Send valid and invalid requests of one operation."""
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
    """Run scenarios along the links of the document."""

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
        # Answers are not deterministic, and later requests depend on them. When hypothesis notices, it ends the run and
        # another run begins.
        with suppress(hypothesis.errors.Flaky):
            machine.run(settings=_settings(SCENARIOS))
