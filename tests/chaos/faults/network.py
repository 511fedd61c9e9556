"""A network between processes and store that loses replies, cuts connections and delays."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chaos.clients import SentEvents
from tests.chaos.deployment import wait_until
from tests.chaos.proxy import NetworkFaults, Proxy
from tests.chaos.run import Run

#: Shorter than the socket's time-out (a late reply) and longer (an error).
SHORT_SILENCE_S, LONG_SILENCE_S = 1.0, 6.0


def lose_replies(run: Run) -> None:
    """Connections are cut after the store executed a request and before its reply."""
    _under(run, NetworkFaults(reply_lost=0.01))


def cut_connections(run: Run) -> None:
    """Connections are cut at random, sometimes all at once."""

    def cut(proxy: Proxy) -> None:
        time.sleep(run.rng.uniform(0, 0.5))
        proxy.cut_all()

    _under(run, NetworkFaults(cut=0.005), cut)


def delay_replies(run: Run) -> None:
    """100 ms delay in both directions, with cuts: no reply may reach another request."""
    _under(run, NetworkFaults(delay_s=0.1, cut=0.005), clients=12)


def drop_all_bytes(run: Run) -> None:
    """Nothing is forwarded for a while, shorter and longer than a time-out: a command may still be executed later."""

    def drop(proxy: Proxy) -> None:
        proxy.faults = NetworkFaults(dropped=True)
        time.sleep(run.rng.choice((SHORT_SILENCE_S, LONG_SILENCE_S)))
        proxy.faults = NetworkFaults()
        # Dropped bytes never arrive, so the connections are useless afterwards.
        proxy.cut_all()
        time.sleep(run.rng.uniform(0.2, 1.0))

    _under(run, NetworkFaults(), drop)


def _under(
    run: Run,
    faults: NetworkFaults,
    meanwhile: Callable[[Proxy], None] = lambda proxy: time.sleep(0.1),
    *,
    clients: int = 4,
) -> None:
    sent = SentEvents()
    with (
        run.deployment(servers=2, workers=2) as deployment,
        Proxy(deployment.folder / "p.sock", deployment.valkey.socket, run.rng) as proxy,
    ):
        deployment.store_url = proxy.url
        deployment.start()
        deployment.keep()
        with run.load(deployment, sent, clients=clients, repeated=0.3):
            proxy.faults = faults
            # Until enough events were sent, not only for a time.
            while run.going() or (faults.cut + faults.reply_lost and proxy.cuts < 3):
                meanwhile(proxy)
            if faults.cut + faults.reply_lost == 0 and faults.delay_s == 0:
                proxy.faults = NetworkFaults()
        proxy.faults = NetworkFaults()
        wait_until(lambda: len(deployment.urls()) == 2, "the servers are there")
        run.row.kills += proxy.cuts
        run.audit_store(deployment, sent)
    run.note(f"{proxy.cuts} cuts, {sent.unanswered} requests without an answer, {sent.refused} refused with 503")
