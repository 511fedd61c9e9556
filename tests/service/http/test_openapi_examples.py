"""Every operation has examples, and they match the models and real answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel
from redis.asyncio import Redis

from metaban.service.http import openapi
from metaban.service.http.app import ROUTERS, create_app
from metaban.service.http.schemas.recommend import EXPLANATION_EXAMPLE, ExplanationOut
from metaban.service.settings.environment import Settings
from tests.service.apps import ARMS, running_app
from tests.service.scripted_engine import OneEngine, ScriptedEngine
from tests.worker.workshop import soon

JSON = "application/json"
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


@cache
def document() -> dict[str, Any]:
    return create_app(Settings(), OneEngine(ScriptedEngine())).openapi()  # type: ignore[arg-type]


def contents() -> Iterator[tuple[str, dict[str, Any]]]:
    """All JSON bodies of requests and successful answers."""
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            called = f"{method.upper()} {path}"
            sent = operation.get("requestBody", {}).get("content", {})
            if JSON in sent:
                yield f"{called} takes", sent[JSON]
            for status, response in operation["responses"].items():
                if status.startswith("2") and JSON in response.get("content", {}):
                    yield f"{called} {status}", response["content"][JSON]


def examples_of(content: dict[str, Any]) -> list[Any]:
    if "examples" in content:
        return [example["value"] for example in content["examples"].values()]
    model = content["schema"].get("$ref", "").rpartition("/")[2]
    examples: list[Any] = document()["components"]["schemas"].get(model, {}).get("examples", [])
    return examples


@pytest.mark.parametrize(
    ("called", "content"), list(contents()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_every_body_has_an_example(called: str, content: dict[str, Any]) -> None:
    assert examples_of(content), f"{called}: put one into the model's json_schema_extra"


def models() -> list[type[BaseModel]]:
    """The models of answers and request bodies."""
    answered = [route.response_model for route in ROUTES if route.response_model is not None]
    sent = [model for route in ROUTES for model in _bodies(route)]
    return list(dict.fromkeys([*answered, *sent]))


def _bodies(route: APIRoute) -> tuple[type[BaseModel], ...]:
    return route.openapi_extra.models if isinstance(route.openapi_extra, openapi.BodyDescription) else ()


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_examples_match_their_models(model: type[BaseModel]) -> None:
    for example in openapi.examples_of(model):
        # Members unknown to the model would be missing.
        assert model.model_validate(example).model_dump(mode="json", exclude_unset=True) == example


def test_parts_of_an_explanation_add_up() -> None:
    example = ExplanationOut(**EXPLANATION_EXAMPLE)
    assert example.model_dump() == EXPLANATION_EXAMPLE
    by_features = [each.contribution for each in example.contributions]
    by_features += [example.absent, example.intercept, example.other]
    assert math.fsum(by_features) == pytest.approx(example.shared + example.user)
    blocks = [example.shared, example.user, example.arm, example.taste, example.memory]
    assert math.fsum(blocks) == pytest.approx(example.mean)


def shape(value: Any) -> Any:
    """The names of all members, at every depth; of a list, those of its first element."""
    if isinstance(value, dict):
        return {name: shape(member) for name, member in value.items()}
    return shape(value[0]) if isinstance(value, list) and value else None


async def test_answers_have_the_members_of_the_examples(redis: Redis, valkey_url: str) -> None:
    paths = ("/admin/config", "/admin/namespaces/{name}", "/admin/stream", "/health/live", "/health/ready")
    async with running_app(valkey_url, samples_kept=256) as (_, http):
        answers = {"POST /recommend": (await http.post("/recommend", json={"user_id": "u", "arms": ARMS})).json()}
        await http.patch("/admin/config", json={"epsilon": 0.05})
        await http.post("/admin/namespaces", json={"name": "shop", "partitions": 4, "arm_features": 12})

        async def answered(path: str) -> bool:
            """Ask; on a busy machine the readiness check may time out, which is another answer than the example."""
            answer = await http.get(path.format(name="shop"))
            answers[f"GET {path}"] = answer.json()
            return answer.status_code == 200

        for path in paths:
            await soon(partial(answered, path), path)
    shown = {called: examples_of(content)[0] for called, content in contents()}
    for called, answer in answers.items():
        assert shape(answer) == shape(shown[f"{called} 200"]), called
    assert answers["GET /admin/config"]["settings"] == shown["GET /admin/config 200"]["settings"]
    for called in ("GET /admin/namespaces/{name}", "GET /health/live", "GET /health/ready"):
        assert {**answers[called], "revision": 0} == {**shown[f"{called} 200"], "revision": 0}
