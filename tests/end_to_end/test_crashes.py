"""Killed processes: every acknowledged reward is learned once, and the deployment recovers by itself."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from metaban.bench.worlds.environments import SyntheticGroups
from metaban.service.process.local_deployment import Deployment
from tests.end_to_end.steps import applied_events, play_over_http, valkey_pid

pytestmark = pytest.mark.slow


def test_a_killed_parent_leaves_nothing_that_hinders_the_next_start(tmp_path: Path) -> None:
    service = Deployment(tmp_path, {"METABAN_DURABILITY": "always"})
    service.start()
    with httpx.Client(base_url=service.url, timeout=60) as client:
        play_over_http(client, SyntheticGroups(seed=3), 0, 10)
    left_over = valkey_pid(service)
    service.kill()
    with service:
        assert valkey_pid(service) != left_over
        assert applied_events(service) == 10
        with httpx.Client(base_url=service.url, timeout=60) as client:
            play_over_http(client, SyntheticGroups(seed=4), 100, 105)
        assert applied_events(service) == 15
