"""`metaban demo`: find a service or start one, let the show run, and leave nothing behind."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol

from rich.live import Live

from service.client import Metaban
from service.client_errors import ConnectionFailed, Forbidden, MetabanError
from service.demo import DIMENSION, Story, World, look_into_groups, play
from service.demo_view import draw, live, summary
from service.terminal import WRONG_USE, fail, stderr, stdout

#: Where `metaban serve` listens unless told otherwise.
USUAL_URL: Final = "http://127.0.0.1:8000"
#: How often the screen is drawn anew.
FRAMES_PER_S: Final = 5


class Service(Protocol):
    """A service that runs."""

    url: str


#: Starts a private service with its state in a folder.
Starter = Callable[[Path], AbstractContextManager[Service]]


def run_demo(
    start: Starter,
    *,
    url: str | None,
    users: int,
    rounds: int,
    seed: int,
    plot: Path | None,
    namespace: str | None,
    key: str | None,
) -> None:
    """The whole command."""
    if plot is not None and plot.suffix.lower() != ".png":
        fail("--plot writes a PNG: name the file so", status=WRONG_USE)
    world, story = World(users=users, rounds=rounds, seed=seed), Story()
    try:
        with ExitStack() as stack:
            address = stack.enter_context(_service(start, url))
            name = stack.enter_context(_stage(address, key, namespace))
            metaban = stack.enter_context(Metaban(address, key, name))
            stdout.print(f"playing at {address}, in namespace {name}", markup=False)
            _show(metaban, world, story)
            look_into_groups(metaban, world, story)
    except (MetabanError, ValueError, RuntimeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("stopped")
    if story.rounds:
        stdout.print(summary(story), soft_wrap=False)
        if plot is not None:
            draw(story, plot)
            stdout.print(f"picture  {plot}", markup=False)


def _show(metaban: Metaban, world: World, story: Story) -> None:
    if not stdout.is_terminal:
        for _ in play(metaban, world, story):
            pass
        return
    with Live(
        console=stdout, refresh_per_second=FRAMES_PER_S, transient=True, get_renderable=lambda: live(world, story)
    ):
        for _ in play(metaban, world, story):
            pass


@contextmanager
def _service(start: Starter, url: str | None) -> Iterator[str]:
    """The address of the service to play with."""
    if url is not None or _answers(USUAL_URL):
        yield url or USUAL_URL
        return
    with tempfile.TemporaryDirectory(prefix="metaban-demo-") as folder:
        stderr.print("starting a private service …")
        with start(Path(folder)) as running:
            yield running.url


def _answers(url: str) -> bool:
    with Metaban(url, timeout_s=2.0, retries=0) as metaban:
        try:
            return metaban.health.ready().ok
        except MetabanError:
            return False


@contextmanager
def _stage(url: str, key: str | None, namespace: str | None) -> Iterator[str]:
    """The namespace to play in: the one that was named, or a new one, which is deleted afterwards."""
    if namespace is not None:
        yield namespace
        return
    name = f"demo-{secrets.token_hex(4)}"
    with Metaban(url, key) as operator:
        try:
            operator.admin.namespaces.create(name, arm_features=DIMENSION)
        except Forbidden:
            fail("this key may not make a namespace for the show: name one that is there with --namespace")
        try:
            yield name
        finally:
            try:
                operator.admin.namespaces.delete(name)
            except ConnectionFailed:
                stderr.print(f"the namespace {name} was not deleted: the service does not answer")
