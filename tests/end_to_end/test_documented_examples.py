"""The examples of the document, sent to a new service in the order in which it says that they can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.deployment import Deployment
from service.examples import MENU, TRANSFER_EXAMPLES

JSON, LINES = "application/json", "application/x-ndjson"
#: Calls that take a body, in the order of the story: an arm before it is chosen, a decision before its reward, and in
#: the end what changes how the others are answered.
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
#: Calls whose paths name what is there after the story. Ids of letters, jobs and snapshots are made by the service, and
#: their examples show only what they look like.
AFTERWARDS = (
    "POST /decisions/{decision_id}/activate",
    "GET /admin/arms/{arm_id}",
    "GET /admin/users/{user_id}",
    "GET /admin/namespaces/{name}",
)
#: Examples of features in another form, and the namespace that they say they are for.
ELSEWHERE = {("POST /recommend", "lists"): "news"}
#: Says that it waits until clusters are told apart, which takes many more users than the story has.
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
    """Each example of what a call takes: its name, its media type and itself."""
    for media, content in operation["requestBody"]["content"].items():
        if "example" in content:
            yield "", media, content["example"]
        for name, example in content.get("examples", {}).items():
            yield name, media, example["value"]
        model = content["schema"].get("$ref", "").rpartition("/")[2]
        for place, example in enumerate(document["components"]["schemas"].get(model, {}).get("examples", ())):
            yield f"{model} {place}", media, example


def path_of(called: str, operation: dict[str, Any]) -> str:
    """The path, with the examples of what it names."""
    path = called.partition(" ")[2]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
    return path


def learn_enough(client: httpx.Client) -> None:
    """What the example of transfer says that it needs: rewards of the target and of its sources."""
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
            learn_enough(client)
        for name, media, body in bodies(document, calls[called]):
            if called in {"POST /admin/arms", "POST /admin/namespaces"} and body in already:
                continue  # the model shows one that the call shows too, and what is made once is there
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
