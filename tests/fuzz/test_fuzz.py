"""A short run of the fuzzer; `make fuzz` takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.deployment import Deployment
from tests.fuzz.fuzzing import fuzz

EXAMPLES = 130
SEED = 1


@pytest.mark.timeout(240)
def test_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    with Deployment(tmp_path) as service:
        findings = fuzz(service.url, examples=EXAMPLES, seed=SEED)
        log = service.log()
    assert findings.violations == []
    assert findings.server_errors == 0
    assert findings.examples >= EXAMPLES
    assert findings.linked > EXAMPLES / 4
    answered = findings.operations()
    for operation in ("POST /recommend", "POST /feedback", "GET /admin/users/{user_id}", "PATCH /admin/config"):
        assert answered[operation].total(), f"{operation} was not asked"
    assert answered["POST /recommend"]["2xx"], "no question was answered, so little was tried"
    assert '"level": "error"' not in log
