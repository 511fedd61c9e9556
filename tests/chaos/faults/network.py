"""A network between processes and store that loses replies, cuts connections and takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.chaos.deployment import wait_until
from tests.chaos.ledger import Ledger
from tests.chaos.proxy import Proxy, Weather
from tests.chaos.run import Run

#: Shorter than the socket's time-out, so that it ends in a late reply and not in an error, and the other way round.
SHORT_SILENCE_S, LONG_SILENCE_S = 1.0, 6.0


def lose_replies(run: Run) -> None:
    """Connections are cut when the store has executed a request and before it is told so."""
    _under(run, Weather(reply_lost=0.01))


def cut_connections(run: Run) -> None:
    """Connections are cut at random, all at once now and then."""

    def cut(proxy: Proxy) -> None:
        time.sleep(run.rng.uniform(0, 0.5))
        proxy.cut_all()

    _under(run, Weather(cut=0.005), cut)


def slow_down(run: Run) -> None:
    """100 ms in either direction, with cuts in the middle: no reply may reach another request."""
    _under(run, Weather(delay_s=0.1, cut=0.005), clients=12)


def fall_silent(run: Run) -> None:
    """Nothing is passed on for a while, shorter and longer than a time-out: what was sent may still be executed."""

    def swallow(proxy: Proxy) -> None:
        proxy.weather = Weather(swallowed=True)
        time.sleep(run.rng.choice((SHORT_SILENCE_S, LONG_SILENCE_S)))
        proxy.weather = Weather()
        # What was swallowed never arrives, so a connection that lost something is of no use.
        proxy.cut_all()
        time.sleep(run.rng.uniform(0.2, 1.0))

    _under(run, Weather(), swallow)


def _under(
    run: Run, weather: Weather, meanwhile: Callable[[Proxy], None] = lambda proxy: time.sleep(0.1), *, clients: int = 4
) -> None:
    ledger = Ledger()
    with (
        run.deployment(servers=2, workers=2) as deployment,
        Proxy(deployment.folder / "p.sock", deployment.valkey.socket, run.rng) as proxy,
    ):
        deployment.store_url = proxy.url
        deployment.start()
        deployment.keep()
        with run.load(deployment, ledger, clients=clients, repeated=0.3):
            proxy.weather = weather
            # Not for the time alone: something has to have happened.
            while run.going() or (weather.cut + weather.reply_lost and proxy.cuts < 3):
                meanwhile(proxy)
            if weather.cut + weather.reply_lost == 0 and weather.delay_s == 0:
                proxy.weather = Weather()
        proxy.weather = Weather()
        wait_until(lambda: len(deployment.urls()) == 2, "the servers are there")
        run.row.kills += proxy.cuts
        run.close_books(deployment, ledger)
    run.note(f"{proxy.cuts} cuts, {ledger.unanswered} requests without an answer, {ledger.refused} refused with 503")
