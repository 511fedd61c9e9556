"""Prometheus metrics. Each app has its own registry, so that two apps in one process do not mix.

Metrics of a namespace have its name as their first label; `Metrics.of` binds it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Final, Literal, TypeAlias, final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector, Summary
from prometheus_client.exposition import choose_encoder

from metaban.models.default.calibration import ReliabilityTable
from metaban.service.telemetry.tracing import REQUEST_SPAN, end_child

#: Edges of the latency histograms, in seconds: a decision takes a millisecond or so.
LATENCY_EDGES_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

#: Edges for the stages of a request, some of which are very short.
STAGE_EDGES_S: Final = (0.00005, 0.0001, 0.0002, *LATENCY_EDGES_S)

#: Edges of the time from an accepted reward to a served model that has learned it, in seconds.
FRESHNESS_EDGES_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

BATCH_EDGES: Final = (1, 2, 4, 8, 16, 32, 64)

#: Stages of POST /recommend, in order: parse the body, load the user, make a warm start from a new user's profile,
#: score the arms, record the decision.
STAGES: Final = ("intake", "load", "fusion", "score", "record")

#: What scores users without rewards: the prior, or a warm start.
COLD_STARTS: Final = ("meta", "fusion")

#: Codes of the warnings that a namespace cannot learn (`metaban.service.engine.reward_watch`).
WarningCode: TypeAlias = Literal["rewards-equal", "rewards-missing"]

OUTCOMES: Final = ("accepted", "duplicate", "rejected")

#: Reasons for refused requests and connections. The first three belong to a status.
REFUSED_STATUSES: Final = {401: "unauthorized", 408: "body-timeout", 413: "body-too-large"}

REJECTIONS: Final = (
    *REFUSED_STATUSES.values(), "wrong-keys", "rate-limited", "overloaded", "waiting", "wrong-host", "connections",
    "head",
)  # fmt: skip


@final
class Metrics:
    """All collectors of an app."""

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
        self.inflight_requests = gauge("metaban_inflight_requests", "Requests in progress, without probes.")
        self.waiting_requests = gauge("metaban_waiting_requests", "Requests that wait for something to be learned.")
        self.open_connections = gauge("metaban_open_connections", "Open client connections.")
        self.rejected = counter("metaban_rejected_requests", "Refused requests and connections, by reason.", "reason")
        self.ready = gauge("metaban_ready", "1 while /health/ready answers 200.")
        for reason in REJECTIONS:
            self.rejected.labels(reason)  # exposed as 0 before the first one, so that rates start at 0

        # Of a namespace
        self.stage_seconds = histogram(
            "metaban_stage_seconds",
            "Duration of each stage of POST /recommend.",
            STAGE_EDGES_S,
            "namespace",
            "stage",
        )
        self.batch_requests = histogram(
            "metaban_batch_requests", "Requests scored in one batch.", BATCH_EDGES, "namespace"
        )
        self.decisions = counter(
            "metaban_decisions",
            "Decisions; cold_start is none for users with rewards.",
            "namespace",
            "policy",
            "cold_start",
        )
        self.cold_starts = counter(
            "metaban_cold_starts",
            "Decisions for users without rewards, by kind: meta (prior) or fusion (warm start).",
            "namespace",
            "kind",
        )
        self.fusion_version = gauge(
            "metaban_fusion_version", "Version of the served fusion model; 0 if there is none.", "namespace"
        )
        self.fusion_sources = gauge(
            "metaban_fusion_sources", "Users the served fusion model was trained on.", "namespace"
        )
        self.replayed_decisions = counter(
            "metaban_replayed_decisions", "Recommendations answered with a stored decision.", "namespace"
        )
        self.unlogged_decisions = counter(
            "metaban_unlogged_decisions",
            "Decisions that could not be recorded; their rewards cannot be learned.",
            "namespace",
        )
        self.rewards = counter(
            "metaban_rewards", "Rewards received, by outcome: accepted, duplicate or rejected.", "namespace", "outcome"
        )
        # Scaled to 0..1: with negative rewards the sum would fall, which `rate` takes for a restart.
        self.reward = Summary(
            "metaban_reward",
            "Sum and number of accepted rewards, scaled to 0..1.",
            ["namespace"],
            registry=registry,
        )
        self.backlog = gauge("metaban_backlog_events", "Events waiting to be learned.", "namespace")
        self.backlog_fill = gauge(
            "metaban_backlog_fill_ratio",
            "Waiting events of the fullest partition, as a share of METABAN_BACKLOG_LIMIT.",
            "namespace",
        )
        self.oldest_event_age = gauge(
            "metaban_oldest_event_age_seconds", "Age of the oldest waiting event; 0 if none waits.",
            "namespace",
        )  # fmt: skip
        self.dead_letters = gauge("metaban_dead_letters", "Dead letters kept now.", "namespace")
        self.store_up = gauge("metaban_store_up", "1 while the store answers.", "namespace")
        self.served_epoch = gauge("metaban_served_epoch", "Served epoch.", "namespace")
        self.served_epoch_made = gauge(
            "metaban_served_epoch_timestamp_seconds",
            "Creation time of the served epoch, in seconds since 1970.",
            "namespace",
        )
        self.epoch_due = gauge(
            "metaban_epoch_due", "1 while learned rewards make an epoch due that is not served yet.", "namespace"
        )
        self.calibration = {
            name: gauge(f"metaban_calibration_{name}", text, "namespace")
            for name, text in (
                ("samples", "Rewards compared with the predictions stored with their decisions."),
                ("ece", "Expected calibration error of these predictions."),
                ("mce", "Largest calibration error of a bin with enough samples."),
                ("coverage", "Share of these rewards inside the 90 % interval of their prediction."),
            )
        }
        self.learning_warnings = gauge(
            "metaban_learning_warning",
            "1 while nothing can be learned from the rewards, by code: rewards-equal or rewards-missing.",
            "namespace",
            "code",
        )
        self.users_resident = gauge("metaban_users_resident", "Users whose parameters are in memory.", "namespace")
        self.events = gauge(
            "metaban_events",
            "Events since the namespace was created, by outcome; and quarantined learners.",
            "namespace",
            "state",
        )
        self.freshness_seconds = histogram(
            "metaban_freshness_seconds",
            "Time from the application of a reward by a worker until the served model includes it.",
            FRESHNESS_EDGES_S,
            "namespace",
        )

    def of(self, namespace: str) -> NamespaceMetrics:
        """The collectors of one namespace."""
        view = self._views.get(namespace)
        if view is None:
            view = self._views[namespace] = NamespaceMetrics(self, namespace)
        return view

    def forget(self, namespace: str) -> None:
        """Stop exposing a namespace that is no longer served."""
        self._views.pop(namespace, None)
        for metric in (
            self.stage_seconds, self.batch_requests, self.decisions, self.replayed_decisions, self.unlogged_decisions,
            self.rewards, self.reward, self.backlog, self.backlog_fill, self.oldest_event_age, self.dead_letters,
            self.store_up, self.served_epoch, self.served_epoch_made, self.epoch_due, self.users_resident,
            self.events, self.freshness_seconds, self.cold_starts, self.fusion_version, self.fusion_sources,
            self.learning_warnings, *self.calibration.values(),
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
        self._stage_seconds = metrics.stage_seconds
        self._stages: dict[str, Histogram] = {}
        self._batch_requests = metrics.batch_requests
        self._freshness_seconds = metrics.freshness_seconds
        self._rewards = {outcome: metrics.rewards.labels(namespace, outcome) for outcome in OUTCOMES}
        self._cold_starts = {kind: metrics.cold_starts.labels(namespace, kind) for kind in COLD_STARTS}
        self._warnings = {code: metrics.learning_warnings.labels(namespace, code) for code in get_args(WarningCode)}
        self._replayed = metrics.replayed_decisions.labels(namespace)
        self._unlogged = metrics.unlogged_decisions.labels(namespace)
        self.reward = metrics.reward.labels(namespace)
        self.backlog = metrics.backlog.labels(namespace)
        self.backlog_fill = metrics.backlog_fill.labels(namespace)
        self.oldest_event_age = metrics.oldest_event_age.labels(namespace)
        self.dead_letters = metrics.dead_letters.labels(namespace)
        self.store_up = metrics.store_up.labels(namespace)
        self.served_epoch = metrics.served_epoch.labels(namespace)
        self.served_epoch_made = metrics.served_epoch_made.labels(namespace)
        self.epoch_due = metrics.epoch_due.labels(namespace)
        self.users_resident = metrics.users_resident.labels(namespace)
        self.fusion_version = metrics.fusion_version.labels(namespace)
        self.fusion_sources = metrics.fusion_sources.labels(namespace)

    # Histograms have many lines, so those of a namespace are exposed once they are used.

    @cached_property
    def batch_requests(self) -> Histogram:
        return self._batch_requests.labels(self.namespace)

    @cached_property
    def freshness_seconds(self) -> Histogram:
        return self._freshness_seconds.labels(self.namespace)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one of STAGES, and make it a span of the request's trace if there is one."""
        parent = REQUEST_SPAN.get()
        span = None if parent is None else parent.child(name)
        error: type[BaseException] | None = None
        began_s = time.perf_counter()
        try:
            yield
        except BaseException as raised:
            error = type(raised)
            raise
        finally:
            if name not in self._stages:
                self._stages[name] = self._stage_seconds.labels(self.namespace, name)
            self._stages[name].observe(time.perf_counter() - began_s)
            if span is not None:
                end_child(span, error)

    def count_decision(self, policy: str, cold_start: str | None, *, replayed: bool, logged: bool) -> None:
        """Count one decision of POST /recommend."""
        if replayed:
            self._replayed.inc()
        else:
            self._decisions.labels(self.namespace, policy, cold_start or "none").inc()
            if cold_start is not None:
                self._cold_starts[cold_start].inc()
        if not logged:
            self._unlogged.inc()

    def count_rewards(self, *, accepted: int, duplicates: int, rejected: int) -> None:
        """Count the rewards of one POST /feedback."""
        for outcome, number in zip(OUTCOMES, (accepted, duplicates, rejected), strict=True):
            self._rewards[outcome].inc(number)

    def set_calibration(self, found: ReliabilityTable | None) -> None:
        """Set the calibration gauges; unknown values are not exposed, because 0 would mean perfect."""
        known = {} if found is None else found.summary()
        for name, metric in self._calibration.items():
            value = known.get(name)
            if value is None:
                metric.remove_by_labels({"namespace": self.namespace})
            else:
                metric.labels(self.namespace).set(value)

    def set_warnings(self, codes: Collection[WarningCode]) -> None:
        """Set which warnings hold."""
        for code, metric in self._warnings.items():
            metric.set(code in codes)

    def set_events(self, counts: Mapping[str, int]) -> None:
        """Set the event counters of the store, by state."""
        for state, number in counts.items():
            self._events.labels(self.namespace, state).set(number)
