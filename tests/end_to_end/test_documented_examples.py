"""The examples of the OpenAPI document work on a new service in the documented order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from metaban.service.http.schemas.examples import MENU, TRANSFER_EXAMPLES
from metaban.service.process.local_deployment import Deployment

JSON, LINES = "application/json", "application/x-ndjson"
#: Calls with a body, in an order that works: an arm before it is chosen, a decision before its reward, and last the
#: calls that change how others are answered.
STORY = (
    "POST /admin/namespaces",
    "POST /admin/arms",
    "POST /admin/arms/import",
    "PUT /admin/arms/{arm_id}",
    "POST /recommend",
    "POST /recommend/batch",
    "POST /feedback",
    "POST /admin/groups",
    "POST /admin/transfer",
    "PATCH /admin/config",
)
#: Calls whose paths name things that exist after those calls. Ids of letters, jobs and snapshots are made by the
#: service; their examples only show the form.
AFTERWARDS = (
    "POST /decisions/{decision_id}/activate",
    "GET /admin/arms/{arm_id}",
    "GET /admin/users/{user_id}",
    "GET /admin/namespaces/{name}",
)
#: Examples of features in another form, and the namespace they name.
ELSEWHERE = {("POST /recommend", "lists"): "news"}
#: Says that it waits until clusters are found, which takes many more users than this test has.
WITH_A_CROWD = TRANSFER_EXAMPLES["cluster"]["value"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with Deployment(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def bodies(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The request examples of an operation: name, media type and value."""
    for media, content in operation["requestBody"]["content"].items():
        if "example" in content:
            yield "", media, content["example"]
        for name, example in content.get("examples", {}).items():
            yield name, media, example["value"]
        model = content["schema"].get("$ref", "").rpartition("/")[2]
        for place, example in enumerate(document["components"]["schemas"].get(model, {}).get("examples", ())):
            yield f"{model} {place}", media, example


def path_of(called: str, operation: dict[str, Any]) -> str:
    """The path with its parameters replaced by their examples."""
    path = called.partition(" ")[2]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
    return path


def send_rewards_for_transfer(client: httpx.Client) -> None:
    """Send the rewards that the transfer example needs: of the target and its sources."""
    for user, rewards in {"ada": 30, "ben": 5, "cleo": 5, "dan": 5, "eve": 5}.items():
        for number in range(rewards):
            asked = {"user_id": user, "arms": list(MENU), "decision_id": f"{user}-{number}"}
            client.post("/recommend", json=asked).raise_for_status()
            told = {"decision_id": f"{user}-{number}", "reward": number % 2}
            client.post("/feedback", json=told, params={"wait": "applied"}).raise_for_status()


def test_the_examples_can_be_sent_one_after_the_other(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    calls = operations(document)
    assert {called for called, operation in calls.items() if "requestBody" in operation} == set(STORY)
    already: list[Any] = []
    for called in STORY:
        if called == "POST /admin/transfer":
            send_rewards_for_transfer(client)
        for name, media, body in bodies(document, calls[called]):
            if called in {"POST /admin/arms", "POST /admin/namespaces"} and body in already:
                continue  # created already by the same example of the schema
            already.append(body)
            sent = {"content": body, "headers": {"Content-Type": media}} if media == LINES else {"json": body}
            namespace = ELSEWHERE.get((called, name))
            response = client.request(
                called.partition(" ")[0],
                path_of(called, calls[called]),
                params={} if namespace is None else {"namespace": namespace},
                **sent,
            )
            if body == WITH_A_CROWD:
                assert [error["field"] for error in response.json()["errors"]] == ["sources"]
                continue
            assert response.is_success, (called, name, response.text)
            if called == "POST /recommend/batch":
                assert [result["status"] for result in response.json()["results"]] == [200, 200]
            if called == "POST /feedback":
                assert not response.json()["rejected"]
    for called in AFTERWARDS:
        response = client.request(called.partition(" ")[0], path_of(called, calls[called]))
        assert response.is_success, (called, response.text)
