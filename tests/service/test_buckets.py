"""Buckets of tokens, which rates are kept with."""

from __future__ import annotations

from service.buckets import TokenBuckets


def test_a_bucket_is_emptied_at_once_and_filled_by_and_by() -> None:
    now = 100.0
    buckets = TokenBuckets(2.0, 3, clock=lambda: now)
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("b") == 0.0
    now += 0.25
    assert buckets.take("a") == 0.25
    now += 0.25
    assert buckets.take("a") == 0.0
    now += 1_000
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_senders_are_not_remembered_without_end() -> None:
    buckets = TokenBuckets(1.0, 1, senders_max=2, clock=lambda: 0.0)
    assert buckets.take("a") == 0.0
    assert buckets.take("b") == 0.0
    assert buckets.take("a") == 1.0
    buckets.take("c")  # b was heard least lately
    assert len(buckets) == 2
    assert buckets.take("a") == 1.0
    assert buckets.take("b") == 0.0
