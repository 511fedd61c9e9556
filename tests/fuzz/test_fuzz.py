"""A short run of the fuzzer; `make fuzz` runs longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from metaban.service.process.local_deployment import Deployment
from tests.fuzz.fuzzing import fuzz

EXAMPLES = 130
SEED = 1


@pytest.mark.slow
def test_every_answer_follows_the_openapi_document(tmp_path: Path) -> None:
    with Deployment(tmp_path) as service:
        findings = fuzz(service.url, examples=EXAMPLES, seed=SEED)
        log = service.log()
    assert findings.violations == []
    assert findings.server_errors == 0
    assert findings.examples >= EXAMPLES
    assert findings.linked > EXAMPLES / 4
    answered = findings.operations()
    for operation in ("POST /recommend", "POST /feedback", "GET /admin/users/{user_id}", "PATCH /admin/config"):
        assert answered[operation].total(), f"{operation} was not requested"
    assert answered["POST /recommend"]["2xx"], "no request was answered with success"
    assert '"level": "error"' not in log
