"""What Prometheus sees. Each app has a registry of its own: nothing is global, two apps do not mix."""

from __future__ import annotations

from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

#: Edges of the latency histogram, in seconds: a decision takes a millisecond or so.
LATENCY_EDGES_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: Edges of the time from an accepted reward to a served model that has learned it, in seconds.
FRESHNESS_EDGES_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@final
class Metrics:
    """The collectors, by what they count; the engine sets the gauges it knows about."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)
        self.request_seconds = Histogram(
            "metaban_request_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            ["method", "route", "status"],
            buckets=LATENCY_EDGES_S,
            registry=registry,
        )
        self.decisions = Counter(
            "metaban_decisions",
            "Recommendations made; cold_start is none for users who have rewards.",
            ["policy", "cold_start"],
            registry=registry,
        )
        self.replayed_decisions = Counter(
            "metaban_replayed_decisions", "Recommendations answered from an earlier decision.", registry=registry
        )
        self.unlogged_decisions = Counter(
            "metaban_unlogged_decisions",
            "Recommendations that could not be recorded: no reward can be learned for them.",
            registry=registry,
        )
        self.rewards = Counter(
            "metaban_rewards",
            "Rewards received, by outcome: accepted, duplicate or rejected.",
            ["outcome"],
            registry=registry,
        )
        self.backlog = Gauge("metaban_backlog_events", "Events that wait to be learned.", registry=registry)
        self.served_epoch = Gauge(
            "metaban_served_epoch", "Epoch of the shared parameters that serve requests.", registry=registry
        )
        self.users_resident = Gauge(
            "metaban_users_resident", "Users whose parameters are in memory.", registry=registry
        )
        self.events = Gauge(
            "metaban_events",
            "Events in the store, ever, by what became of them; and learners quarantined.",
            ["state"],
            registry=registry,
        )
        self.freshness_seconds = Histogram(
            "metaban_freshness_seconds",
            "Time from the application of a reward by a worker to a served model that has it.",
            buckets=FRESHNESS_EDGES_S,
            registry=registry,
        )
        for outcome in ("accepted", "duplicate", "rejected"):
            self.rewards.labels(outcome)  # shown as 0 before the first one, so that rates start right

    def count_decision(self, policy: str, cold_start: str | None, *, replayed: bool, logged: bool) -> None:
        """One answer of POST /recommend."""
        if replayed:
            self.replayed_decisions.inc()
        else:
            self.decisions.labels(policy, cold_start or "none").inc()
        if not logged:
            self.unlogged_decisions.inc()

    def count_rewards(self, *, accepted: int, duplicates: int, rejected: int) -> None:
        """One answer of POST /feedback."""
        self.rewards.labels("accepted").inc(accepted)
        self.rewards.labels("duplicate").inc(duplicates)
        self.rewards.labels("rejected").inc(rejected)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All collectors in the format the scraper asks for, and that format's media type."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self.registry), media_type
