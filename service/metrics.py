"""What Prometheus sees. Each app has a registry of its own: nothing is global, two apps do not mix.

What is counted of a namespace has its name as the first label; `Metrics.of` gives the view of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector, Summary
from prometheus_client.exposition import choose_encoder

from models.calibration import Reliability
from service.stages import Stage

#: Edges of the latency histograms, in seconds: a decision takes a millisecond or so.
LATENCY_EDGES_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: Edges for the stages of a request, some of which take no time at all.
STAGE_EDGES_S: Final = (0.00005, 0.0001, 0.0002, *LATENCY_EDGES_S)
#: Edges of the time from an accepted reward to a served model that has learned it, in seconds.
FRESHNESS_EDGES_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BATCH_EDGES: Final = (1, 2, 4, 8, 16, 32, 64)
#: What POST /recommend does, in this order: read and check, load the user, make a warm start of a new user's profile,
#: score the arms, record the decision.
STAGES: Final = ("intake", "load", "fusion", "score", "record")
#: What users begin from of whom nothing is learned.
COLD_STARTS: Final = ("meta", "fusion")
OUTCOMES: Final = ("accepted", "duplicate", "rejected")
#: Why requests and connections are turned away. The first three are statuses of answers.
REFUSED_STATUSES: Final = {401: "unauthorized", 408: "body-timeout", 413: "body-too-large"}
REJECTIONS: Final = (
    *REFUSED_STATUSES.values(), "wrong-keys", "rate-limited", "overloaded", "wrong-host", "connections", "head",
)  # fmt: skip


@final
class Metrics:
    """The collectors, by what they count."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._views: dict[str, NamespaceMetrics] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, edges: Iterable[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=tuple(edges), registry=registry)

        # Of the process
        self.request_seconds = histogram(
            "metaban_request_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            LATENCY_EDGES_S,
            "method",
            "route",
            "status",
        )
        self.inflight_requests = gauge("metaban_inflight_requests", "Requests under way, probes not counted.")
        self.open_connections = gauge("metaban_open_connections", "Connections of clients that are open.")
        self.rejected = counter(
            "metaban_rejected_requests", "Requests and connections turned away, by reason.", "reason"
        )
        self.ready = gauge("metaban_ready", "1 when /health/ready says 200.")
        for reason in REJECTIONS:
            self.rejected.labels(reason)  # shown as 0 before the first one, so that rates start right

        # Of a namespace
        self.stage_seconds = histogram(
            "metaban_stage_seconds",
            "Time that each stage of POST /recommend took.",
            STAGE_EDGES_S,
            "namespace",
            "stage",
        )
        self.batch_requests = histogram(
            "metaban_batch_requests", "Requests that were scored together.", BATCH_EDGES, "namespace"
        )
        self.decisions = counter(
            "metaban_decisions",
            "Recommendations made; cold_start is none for users who have rewards.",
            "namespace",
            "policy",
            "cold_start",
        )
        self.cold_starts = counter(
            "metaban_cold_starts",
            "Recommendations for users without rewards, by what they began from: meta or fusion.",
            "namespace",
            "kind",
        )
        self.fusion_version = gauge(
            "metaban_fusion_version", "Version of the fusion model that starts new users; 0: none.", "namespace"
        )
        self.fusion_sources = gauge("metaban_fusion_sources", "Users that it was made from.", "namespace")
        self.replayed_decisions = counter(
            "metaban_replayed_decisions", "Recommendations answered from an earlier decision.", "namespace"
        )
        self.unlogged_decisions = counter(
            "metaban_unlogged_decisions",
            "Recommendations that could not be recorded: no reward can be learned for them.",
            "namespace",
        )
        self.rewards = counter(
            "metaban_rewards", "Rewards received, by outcome: accepted, duplicate or rejected.", "namespace", "outcome"
        )
        # Not as they were sent: a sum that falls, as with negative ones, is taken for a restart by `rate`.
        self.reward = Summary(
            "metaban_reward",
            "Accepted rewards as they are learned, from 0 to 1: their sum and their number.",
            ["namespace"],
            registry=registry,
        )
        self.backlog = gauge("metaban_backlog_events", "Events that wait to be learned.", "namespace")
        self.backlog_fill = gauge(
            "metaban_backlog_fill_ratio",
            "Share of METABAN_BACKLOG_LIMIT that waits in the fullest partition.",
            "namespace",
        )
        self.oldest_event_age = gauge(
            "metaban_oldest_event_age_seconds", "Age of the event that has waited longest; 0 when none waits.",
            "namespace",
        )  # fmt: skip
        self.dead_letters = gauge("metaban_dead_letters", "Events given up on that lie there now.", "namespace")
        self.store_up = gauge("metaban_store_up", "1 while the store answers.", "namespace")
        self.served_epoch = gauge(
            "metaban_served_epoch", "Epoch of the shared parameters that serve requests.", "namespace"
        )
        self.served_epoch_made = gauge(
            "metaban_served_epoch_timestamp_seconds", "When that epoch was made, in seconds since 1970.", "namespace"
        )
        self.calibration = {
            name: gauge(f"metaban_calibration_{name}", text, "namespace")
            for name, text in (
                ("samples", "Rewards that predictions noted at their decisions were compared with."),
                ("ece", "Expected calibration error of these predictions."),
                ("mce", "Largest calibration error of a bin of them with enough samples."),
                ("coverage", "Share of these rewards inside the 90 % interval of their prediction."),
            )
        }
        self.users_resident = gauge("metaban_users_resident", "Users whose parameters are in memory.", "namespace")
        self.events = gauge(
            "metaban_events",
            "Events in the store, ever, by what became of them; and learners quarantined.",
            "namespace",
            "state",
        )
        self.freshness_seconds = histogram(
            "metaban_freshness_seconds",
            "Time from the application of a reward by a worker to a served model that has it.",
            FRESHNESS_EDGES_S,
            "namespace",
        )

    def of(self, namespace: str) -> NamespaceMetrics:
        """What one namespace counts."""
        view = self._views.get(namespace)
        if view is None:
            view = self._views[namespace] = NamespaceMetrics(self, namespace)
        return view

    def forget(self, namespace: str) -> None:
        """Show a namespace no more that is not served any longer."""
        self._views.pop(namespace, None)
        for metric in (
            self.stage_seconds, self.batch_requests, self.decisions, self.replayed_decisions, self.unlogged_decisions,
            self.rewards, self.reward, self.backlog, self.backlog_fill, self.oldest_event_age, self.dead_letters,
            self.store_up, self.served_epoch, self.served_epoch_made, self.users_resident, self.events,
            self.freshness_seconds, self.cold_starts, self.fusion_version, self.fusion_sources,
            *self.calibration.values(),
        ):  # fmt: skip
            metric.remove_by_labels({"namespace": namespace})

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All collectors in the format the scraper asks for, and that format's media type."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self.registry), media_type


@final
class NamespaceMetrics:
    """The collectors of one namespace; its engine sets the gauges it knows about."""

    def __init__(self, metrics: Metrics, namespace: str) -> None:
        self.namespace = namespace
        self._decisions = metrics.decisions
        self._events = metrics.events
        self._calibration = metrics.calibration
        self._stages = {stage: metrics.stage_seconds.labels(namespace, stage) for stage in STAGES}
        self._rewards = {outcome: metrics.rewards.labels(namespace, outcome) for outcome in OUTCOMES}
        self._cold_starts = {kind: metrics.cold_starts.labels(namespace, kind) for kind in COLD_STARTS}
        self._replayed = metrics.replayed_decisions.labels(namespace)
        self._unlogged = metrics.unlogged_decisions.labels(namespace)
        self.batch_requests = metrics.batch_requests.labels(namespace)
        self.reward = metrics.reward.labels(namespace)
        self.backlog = metrics.backlog.labels(namespace)
        self.backlog_fill = metrics.backlog_fill.labels(namespace)
        self.oldest_event_age = metrics.oldest_event_age.labels(namespace)
        self.dead_letters = metrics.dead_letters.labels(namespace)
        self.store_up = metrics.store_up.labels(namespace)
        self.served_epoch = metrics.served_epoch.labels(namespace)
        self.served_epoch_made = metrics.served_epoch_made.labels(namespace)
        self.users_resident = metrics.users_resident.labels(namespace)
        self.freshness_seconds = metrics.freshness_seconds.labels(namespace)
        self.fusion_version = metrics.fusion_version.labels(namespace)
        self.fusion_sources = metrics.fusion_sources.labels(namespace)

    def stage(self, name: str) -> Stage:
        """Time what runs inside as one of STAGES."""
        return Stage(name, self._stages[name])

    def count_decision(self, policy: str, cold_start: str | None, *, replayed: bool, logged: bool) -> None:
        """One answer of POST /recommend."""
        if replayed:
            self._replayed.inc()
        else:
            self._decisions.labels(self.namespace, policy, cold_start or "none").inc()
            if cold_start is not None:
                self._cold_starts[cold_start].inc()
        if not logged:
            self._unlogged.inc()

    def count_rewards(self, *, accepted: int, duplicates: int, rejected: int) -> None:
        """One answer of POST /feedback."""
        for outcome, number in zip(OUTCOMES, (accepted, duplicates, rejected), strict=True):
            self._rewards[outcome].inc(number)

    def set_calibration(self, found: Reliability | None) -> None:
        """How reliable predictions are; what is not known is not shown, since 0 would be perfect."""
        known = {} if found is None else found.summary()
        for name, metric in self._calibration.items():
            value = known.get(name)
            if value is None:
                metric.remove_by_labels({"namespace": self.namespace})
            else:
                metric.labels(self.namespace).set(value)

    def set_events(self, counts: Mapping[str, int]) -> None:
        """What the store has counted, by state."""
        for state, number in counts.items():
            self._events.labels(self.namespace, state).set(number)
