"""Settings from the environment, readable refusals, and logs without secrets."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog

from metaban.service.http.auth import digest_of
from metaban.service.http.request_context import begin_request
from metaban.service.settings.environment import Settings, SettingsError, load_settings
from metaban.service.telemetry.logging import configure_logging


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {digest_of("a"), digest_of("b")}
    for name, value in {
        "METABAN_DATA_DIR": "/srv/x",
        "METABAN_POLICY": "thompson",
        "METABAN_WIDTH": "64",
        "METABAN_CLIENT_KEYS": ", ".join(digests).upper(),
        "METABAN_ADMIN_KEYS": json.dumps([digest_of("c")]),
        "METABAN_INTERCEPT": "false",
        "METABAN_ALPHA": "",
        "REDIS_URL": "redis://:pass@host/1",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.data_dir == Path("/srv/x")
    assert (settings.policy, settings.width, settings.alpha, settings.intercept) == ("thompson", 64, None, False)
    assert settings.client_keys == digests
    assert settings.has_keys
    assert settings.redis_url == "redis://:pass@host/1"
    assert "pass" not in repr(settings)
    assert digest_of("c") not in repr(settings)


def test_refusals_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "METABAN_PARTITIONS": "0",
        "METABAN_POLICY": "best",
        "METABAN_CLIENT_KEYS": "my-secret-key",
        "REDIS_URL": "http://:my-secret@host",
        "METABAN_NAMESPACE": "Mixed Case",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    lines = str(refusal.value).splitlines()
    assert {line.partition(":")[0] for line in lines} == {
        "METABAN_PARTITIONS",
        "METABAN_POLICY",
        "METABAN_CLIENT_KEYS",
        "REDIS_URL",
        "METABAN_NAMESPACE",
    }
    assert "my-secret" not in str(refusal.value)
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "rediss+cluster"])
def test_url_schemes_of_the_store(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("REDIS_URL", f"{scheme}://:pass@one:7000")
    assert load_settings().redis_url == f"{scheme}://:pass@one:7000"
    monkeypatch.setenv("REDIS_URL", f"{scheme}s+x://:pass@one:7000")
    with pytest.raises(SettingsError, match=r"REDIS_URL: must start with redis://.* or rediss\+cluster://") as refusal:
        load_settings()
    assert "pass" not in str(refusal.value)


def test_the_private_store_has_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METABAN_DURABILITY", "replicated")
    with pytest.raises(SettingsError, match=r"METABAN_DURABILITY: .* set REDIS_URL"):
        load_settings()
    monkeypatch.setenv("REDIS_URL", "redis://host")
    assert load_settings().replicas == 1


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_log_formats(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    try:
        configure_logging(log_format, "info")  # type: ignore[arg-type]
        begin_request("req-1")
        structlog.stdlib.get_logger("ours").info("hello", place="here")
        logging.getLogger("theirs").warning("%d apples", 3)
        logging.getLogger("uvicorn.access").info("GET /?key=secret")
        structlog.stdlib.get_logger("ours").debug("not shown")
        try:
            private = "private-body"
            raise ValueError(len(private))
        except ValueError:
            structlog.stdlib.get_logger("ours").exception("broken")
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.reset_defaults()
        root.handlers, root.level = before
    text = capsys.readouterr().err
    assert "secret" not in text
    assert "not shown" not in text
    # The traceback has the line of code but not the value of the variable.
    assert text.count("private-body") <= 1
    if log_format == "json":
        hello, apples, broken = map(json.loads, text.splitlines())
        assert hello["request_id"] == apples["request_id"] == broken["request_id"] == "req-1"
        assert (hello["event"], hello["place"], hello["level"]) == ("hello", "here", "info")
        assert (apples["event"], apples["logger"]) == ("3 apples", "theirs")
        assert "ValueError" in broken["exception"]
    else:
        assert "3 apples" in text
        assert "ValueError" in text
