"""Every route refuses what its OpenAPI schema forbids, and names the field.

Routes and schemas are read from the OpenAPI document, so new routes are included.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from redis.asyncio import Redis

from tests.service.apps import running_app
from tests.service.http.error_steps import NDJSON, SNAPSHOT
from tests.service.http.error_world import check_problem, described, description, dump, operations

JSON_MEDIA, FILE_MEDIA = "application/json", "application/x-ndjson"
#: Longest body.
MAX_BYTES = 8_192
#: Values of the valid parameters.
GOOD = {"snapshot_id": SNAPSHOT, "letter_id": "1-1", "partition": "0", "name": "shop", "decision_id": "d"}
#: Its schema allows any string; `error_cases` has its wrong values.
WORDS_ALONE = {("PUT /admin/arms/{arm_id}", "if-match"), ("DELETE /admin/arms/{arm_id}", "if-match")}
#: Calls that accept an empty object.
NOTHING_NEEDED = {"/admin/config"}
#: Calls that need one of several members, which no schema says: the field named without any.
ONE_NEEDED = {"/admin/transfer": {"user_id"}}
#: For each pattern, one of these strings does not match.
ODD = ("a\x01b", "a b", "Äß+")


@pytest.fixture
async def http(redis: Redis, valkey_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that has served a request. Afterwards, check that refused requests wrote nothing."""
    limits = {"max_body_bytes": MAX_BYTES, "max_import_bytes": MAX_BYTES, "data_dir": tmp_path}
    async with running_app(valkey_url, **limits) as (_, client):
        client.headers["X-Request-ID"] = "schema-1"
        asked = {"user_id": "u", "arms": [{"id": "a", "features": [1, 2]}], "decision_id": "d"}
        assert (await client.post("/recommend", json=asked)).status_code == 200
        before = await dump(redis)
        yield client
        assert await dump(redis) == before


def plain(path: str, **values: str) -> str:
    """A path with values for its parameters."""
    return re.sub(r"{(\w+)}", lambda found: quote({**GOOD, **values}.get(found[1], "x"), safe=""), path)


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a $ref."""
    if "$ref" in schema:
        found: Mapping[str, Any] = description()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


async def refused(
    http: httpx.AsyncClient, method: str, path: str, status: int, slug: str, blames: str | None, **sent: Any
) -> None:
    """Make a request, check its refusal, and that the status is described."""
    response = await http.request(method, path, **sent)
    check_problem(response, status, slug, blames, "schema-1")
    assert str(status) in described(path)[method], f"{method} {path} says nothing of {status}"


# Parameters


def wrong_values(schema: Mapping[str, Any]) -> Iterator[str]:
    """Values that a schema forbids, as written in a URL."""
    options = [resolved(option) for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    assert len(options) == 1, f"a parameter that is several things: {schema}"
    [option] = options
    choices = option.get("enum", [option["const"]] if "const" in option else [])
    if choices:
        yield "no such choice"
    kind = option.get("type")
    if kind in {"integer", "number", "boolean"}:
        yield from ("perhaps", "")
    if kind == "integer":
        yield from ("1.5", "9" * 5_000)
    for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1), ("exclusiveMaximum", 0)):
        if bound in option:
            yield str(option[bound] + step)
    if "minLength" in option:
        yield ""
    if "maxLength" in option:
        yield "x" * (option["maxLength"] + 1)
    if "pattern" in option:
        odd = [text for text in ODD if not re.search(option["pattern"], text)]
        assert odd, f"nothing breaks {option['pattern']}"
        yield from odd


def parameters() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for method, path, operation in operations():
        for parameter in operation.get("parameters", ()):
            yield method, path, parameter


def test_every_parameter_has_forbidden_values() -> None:
    found = list(parameters())
    silent = {
        (f"{method} {path}", parameter["name"])
        for method, path, parameter in found
        if not any(wrong_values(parameter["schema"]))
    }
    assert len(found) > 40
    assert silent == WORDS_ALONE


async def test_invalid_parameter_is_named(http: httpx.AsyncClient) -> None:
    tried = 0
    for method, path, parameter in parameters():
        name, place = parameter["name"], parameter["in"]
        for wrong in wrong_values(parameter["schema"]):
            if place == "path" and not wrong:
                continue  # another path
            if place == "header" and not wrong.isascii():
                continue
            sent: dict[str, Any] = {"params": required(method, path)}
            if place == "query":
                sent["params"][name] = wrong
            elif place == "header":
                sent["headers"] = {name: wrong}
            url = plain(path, **({name: wrong} if place == "path" else {}))
            response = await http.request(method, url, **sent)
            check_problem(response, 422, "invalid-input", name, "schema-1")
            assert "422" in described(plain(path))[method]
            tried += 1
    assert tried > 100


def required(method: str, path: str) -> dict[str, str]:
    """Required query parameters."""
    return {
        parameter["name"]: "x"
        for known, template, parameter in parameters()
        if (known, template) == (method, path) and parameter["in"] == "query" and parameter.get("required")
    }


# Bodies


def bodies(media: str) -> list[Any]:
    """All operations with a body of a media type, and its schema."""
    return [
        pytest.param(method, path, operation["requestBody"]["content"][media], id=f"{method} {path}")
        for method, path, operation in operations()
        if media in operation.get("requestBody", {}).get("content", {})
    ]


def test_every_operation_with_a_body_is_checked() -> None:
    taking = {(method, path) for method, path, operation in operations() if "requestBody" in operation}
    known = {tuple(call.values[:2]) for media in (JSON_MEDIA, FILE_MEDIA) for call in bodies(media)}
    assert len(known) >= 9
    assert taking == known


@pytest.mark.parametrize(("method", "path", "content"), bodies(JSON_MEDIA))
class TestJson:
    async def test_malformed(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        for body in (b"", b"{", b'{"a": }', b"\xff", b'{"user_id": "\xff"}', b"{} {}", b"'a'"):
            sent = {"content": body, "headers": {"Content-Type": JSON_MEDIA}}
            await refused(http, method, plain(path), 400, "malformed-body", None, **sent)

    async def test_another_type(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        for media in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", "*/*"):
            sent = {"content": b"{}", "headers": {"Content-Type": media}}
            await refused(http, method, plain(path), 415, "unsupported-media", None, **sent)
        for encoding in ("gzip", "br", "identity, gzip"):
            sent = {"content": b"{}", "headers": {"Content-Type": JSON_MEDIA, "Content-Encoding": encoding}}
            await refused(http, method, plain(path), 415, "unsupported-media", None, **sent)

    async def test_body_that_is_no_object(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        for body in (b"[]", b"null", b"1", b'"a"', b"true"):
            sent = {"content": body, "headers": {"Content-Type": JSON_MEDIA}}
            await refused(http, method, plain(path), 422, "invalid-input", "", **sent)

    async def test_unknown_member_is_refused(
        self, http: httpx.AsyncClient, method: str, path: str, content: Any
    ) -> None:
        for body in [{}, *examples(content)]:
            sent = {"json": {**body, "colour": 1}}
            await refused(http, method, plain(path), 422, "invalid-input", "colour", **sent)

    async def test_invalid_member_is_named(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        found = examples(content)
        tried = 0
        for schema in models(content["schema"]):
            for name in schema["properties"]:
                if name == "requests":
                    continue  # each entry has its own answer
                body = next((each for each in found if set(each) <= set(schema["properties"])), {})
                # No schema allows nested lists.
                response = await http.request(method, plain(path), json={**body, name: [[]]})
                problem = response.json()
                assert (response.status_code, problem["type"]) == (422, "/problems/invalid-input"), (name, problem)
                fields = {re.split(r"[.\[]", error["field"])[0] for error in problem["errors"]}
                assert name in fields, (name, problem)
                tried += 1
        assert tried or "batch" in path

    async def test_missing_member_is_named(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        needed = set(models(content["schema"])[0].get("required", ())) or ONE_NEEDED.get(path, set())
        if needed or path not in NOTHING_NEEDED:
            response = await http.request(method, plain(path), json={})
            assert response.status_code == 422, response.text
            assert {error["field"] for error in response.json()["errors"]} == needed

    async def test_too_long(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        await too_long(http, method, plain(path), {"Content-Type": JSON_MEDIA})


def models(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The object schemas of a body."""
    return [resolved(option) for option in schema.get("anyOf", [schema])]


def examples(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Valid bodies."""
    named = [example["value"] for example in content.get("examples", {}).values()]
    return named + [example for schema in models(content["schema"]) for example in schema.get("examples", ())]


async def too_long(http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(MAX_BYTES // 1_000 + 1):
            yield b" " * 1_000

    for body in (b" " * (MAX_BYTES + 1), unannounced()):
        await refused(http, method, path, 413, "body-too-large", None, content=body, headers=headers)


@pytest.mark.parametrize(("method", "path", "content"), bodies(FILE_MEDIA))
class TestFiles:
    async def test_another_type(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        for media in ("", JSON_MEDIA, "text/plain", "application/x-www-form-urlencoded"):
            sent = {"content": b"{}", "headers": {"Content-Type": media}}
            await refused(http, method, plain(path), 415, "unsupported-media", None, **sent)
        sent = {"content": b"{}", "headers": {**NDJSON, "Content-Encoding": "gzip"}}
        await refused(http, method, plain(path), 415, "unsupported-media", None, **sent)

    async def test_too_long(self, http: httpx.AsyncClient, method: str, path: str, content: Any) -> None:
        await too_long(http, method, plain(path), NDJSON)
