"""Token buckets of the rate limits."""

from __future__ import annotations

from metaban.service.http.admission import TokenBuckets


def test_bucket_allows_a_burst_and_refills() -> None:
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


def test_number_of_senders_is_bounded() -> None:
    buckets = TokenBuckets(1.0, 1, senders_max=2, clock=lambda: 0.0)
    assert buckets.take("a") == 0.0
    assert buckets.take("b") == 0.0
    assert buckets.take("a") == 1.0
    buckets.take("c")  # b is the least recent sender
    assert len(buckets) == 2
    assert buckets.take("a") == 1.0
    assert buckets.take("b") == 0.0
