"""`metaban demo`: finds or starts a service, runs the demo, and cleans up."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

from rich.live import Live

from metaban.client import ConnectionFailed, Forbidden, Metaban, MetabanError
from metaban.service.cli.demo_view import draw, live, summary
from metaban.service.cli.demo_world import DIMENSION, DemoWorld, Story, look_into_groups, play
from metaban.service.cli.terminal import WRONG_USE, fail, stderr, stdout

#: Default address of `metaban serve`.
USUAL_URL: Final = "http://127.0.0.1:8000"

#: Screen updates per second.
FRAMES_PER_S: Final = 5


class Service(Protocol):
    """A running service."""

    url: str


#: Starts a private service with its data in a folder.
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
    """Run the command."""
    if plot is not None and plot.suffix.lower() != ".png":
        fail("--plot writes a PNG: the file name must end with .png", status=WRONG_USE)
    if plot is not None and find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: pip install '.[bench]' in a clone of metaban", status=WRONG_USE)
    world, story = DemoWorld(users=users, rounds=rounds, seed=seed), Story()
    try:
        with ExitStack() as stack:
            address = stack.enter_context(_service(start, url))
            name = stack.enter_context(_demo_namespace(address, key, namespace))
            metaban = stack.enter_context(Metaban(address, key, name))
            stdout.print(f"demo at {address}, in namespace {name}", markup=False)
            _show(metaban, world, story)
            look_into_groups(metaban, world, story)
    except (MetabanError, RuntimeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("stopped")
    if story.rounds:
        stdout.print(summary(story), soft_wrap=False)
        if plot is not None:
            draw(story, plot)
            stdout.print(f"plot  {plot}", markup=False)


def _show(metaban: Metaban, world: DemoWorld, story: Story) -> None:
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
    """The address of the service to use."""
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
def _demo_namespace(url: str, key: str | None, namespace: str | None) -> Iterator[str]:
    """The namespace of the demo: the given one, or a new one that is deleted afterwards."""
    if namespace is not None:
        yield namespace
        return
    name = f"demo-{secrets.token_hex(4)}"
    with Metaban(url, key) as operator:
        try:
            operator.admin.namespaces.create(name, arm_features=DIMENSION)
        except Forbidden:
            fail("this key may not create a namespace: name an existing one with --namespace")
        try:
            yield name
        finally:
            try:
                operator.admin.namespaces.delete(name)
            except ConnectionFailed:
                stderr.print(f"the namespace {name} was not deleted: the service does not answer")
