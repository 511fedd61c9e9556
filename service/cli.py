"""The `metaban` command. What is heavy (torch, the engine, the worker) is imported by the command that needs it."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from bench.cli import bench_app
from service.cli_arms import arms_app
from service.cli_letters import letters_app
from service.cli_snapshot import snapshot_app
from service.settings import Settings, SettingsError
from service.terminal import fail, print_rows, settings_or_exit, stderr, stdout

if TYPE_CHECKING:
    from service.server import Running

LEVEL_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

#: Lines of epilogs fit into 80 columns: typer breaks longer ones and fills them up with blanks, which hurts what is
#: to be pasted. For that reason, too, none goes on after a backslash.
EPILOG: Final = """
[bold]Examples[/bold]

  metaban serve                   # service, worker, private Valkey, ./data

  METABAN_DATA_DIR=/srv/metaban metaban serve   # with the state elsewhere

  REDIS_URL=redis://localhost metaban serve     # with a Redis of your own

  metaban demo                    # watch it learn, on simulated users

  metaban key                     # a key for clients, and its digest

  metaban doctor                  # what is missing here, and what to do

Commands that look at the store work on the namespace of METABAN_NAMESPACE;
/docs of the service has all calls. Settings are environment variables;
`metaban settings` lists all of them.
"""

app = typer.Typer(
    name="metaban",
    help="Online recommendations from neural bandits: ask which arm to show, say how it went, get better answers.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Local variables hold URLs with passwords.
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"metaban {version('metaban')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


Host = Annotated[str, typer.Option(help="Address to listen on. Without keys only a loopback address is accepted.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]


@app.command(
    epilog="""
[bold]Try it[/bold]

  curl -s localhost:8000/recommend -H 'Content-Type: application/json' -d '{
    "decision_id": "first-order", "user_id": "ada", "arms": [
    {"id": "espresso",  "features": {"kind": "coffee", "hot": true}},
    {"id": "sencha",    "features": {"kind": "tea",    "hot": true}},
    {"id": "croissant", "features": {"kind": "pastry", "hot": false}}]}'

  curl -s localhost:8000/feedback -H 'Content-Type: application/json' -d '{
    "decision_id": "first-order", "reward": 1}'

Ctrl-C and SIGTERM stop in order: requests are served for METABAN_DRAIN_S more
while /health/ready sends them elsewhere (a second signal skips that), those
under way are finished, then the worker, the private Valkey.
"""
)
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Also run a worker, which learns from the rewards.")
    ] = True,
) -> None:
    """Serve recommendations over HTTP."""
    settings = settings_or_exit()
    from service.logging import configure_logging
    from service.server import ServeError, serve
    from service.setting_variables import warn_of_unknown_variables
    from store.errors import StoreError

    configure_logging(settings.log_format, settings.log_level)
    warn_of_unknown_variables()
    try:
        serve(settings, host, port, with_worker=worker, announce=lambda running: _announce(settings, running))
    except (ServeError, SettingsError, StoreError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("stopped before it had started")


@app.command()
def worker() -> None:
    """Learn from rewards of all namespaces, without serving requests.

    Needs REDIS_URL: any number of workers may share the store of any number of `metaban serve --no-worker`.
    """
    settings = settings_or_exit()
    if settings.redis_url is None:
        fail("set REDIS_URL to the store to work on; `metaban serve` has a worker for its private Valkey already")
    from service.descriptors import raise_limit
    from service.logging import configure_logging
    from service.setting_variables import warn_of_unknown_variables
    from service.supervisor import end_with_parent
    from store.errors import StoreError
    from worker.namespace_work import WorkerSettings
    from worker.runtime import run_worker

    configure_logging(settings.log_format, settings.log_level)
    warn_of_unknown_variables()
    end_with_parent()
    raise_limit()
    try:
        run_worker(
            settings.redis_url,
            WorkerSettings(
                samples_kept=settings.samples_kept,
                dedupe_window_s=settings.dedupe_window_s,
                backlog_limit=settings.backlog_limit,
                candidate_pool=settings.candidate_pool,
                device=settings.device,
                torch_threads=settings.torch_threads,
                fusion=settings.fusion,
                fusion_interval_s=settings.fusion_interval_s,
                fusion_growth=settings.fusion_growth,
                fusion_min_sources=settings.fusion_min_sources,
            ),
        )
    except StoreError as error:
        fail(str(error))


@app.command()
def doctor(host: Host = "127.0.0.1", port: Port = 8000) -> None:
    """Look for what would keep the service from running here. Exits with 1 when something would."""
    settings = settings_or_exit()
    from service.doctor import collect

    checks = collect(settings, host=host, port=port)
    print_rows(
        ("", "check", "found", "what to do"),
        [(Text(row.level, LEVEL_COLOURS[row.level]), row.name, row.detail, row.advice) for row in checks],
        unbroken={""},
    )
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)


@app.command()
def key() -> None:
    """Make a key for clients or admins. Only its digest is given to the service; the key is shown once."""
    from service.auth import FreshKey

    fresh = FreshKey.generate()
    stdout.print(f"key     {fresh.key}\ndigest  {fresh.digest}", markup=False)
    stderr.print(
        "\nClients send the key in the X-API-Key header. The service knows it by its digest (several: by commas):\n"
        f"  METABAN_CLIENT_KEYS={fresh.digest}\n"
        "or METABAN_ADMIN_KEYS, for a key that may administer. That is good for all namespaces; for one alone put its\n"
        "name and a colon before the digest.",
        markup=False,
    )


@app.command("settings")
def show_settings() -> None:
    """List every setting: its variable, its value now, and what it means. Secrets are not shown."""
    from service.setting_variables import setting_rows

    rows = list(setting_rows(settings_or_exit()))
    print_rows(("variable", "value", "meaning"), rows, unbroken={"variable"})


@app.command(
    epilog="""
[bold]The world[/bold]

  Items are points on a sphere, and users belong to three hidden groups
  (half, 30 % and 20 % of them). A group likes what is near one of its two
  favourite spots: no linear function of the features, and nothing tells users
  of two groups apart but what they like. Most users arrive while the show
  runs. A chooser without a clue plays beside.

The show plays in a namespace of its own, which it removes at the end. With
--seed the world is the same every time; what the service chooses also depends
on when its worker has learned what.
"""
)
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            help="A service to play with. Left out: the one on http://127.0.0.1:8000, or, when nothing answers there, "
            "a private one that is started for the show."
        ),
    ] = None,
    users: Annotated[int, typer.Option(min=4, max=100_000, help="Simulated users.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, max=10_000_000, help="Questions asked, each with its reward.")] = 1_500,
    seed: Annotated[int, typer.Option(min=0, help="Of the world and of everybody's luck.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) here.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Play in this one, which is there, and leave it there.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="METABAN_KEY", help="The service's admin key, if it has one.")
    ] = None,
) -> None:
    """Watch the service learn: simulated users with hidden tastes, asked about and rewarded over HTTP."""
    from bench.deployment import Deployment
    from service.cli_demo import run_demo

    run_demo(
        Deployment,
        url=url,
        users=users,
        rounds=rounds,
        seed=seed,
        plot=plot,
        namespace=namespace,
        key=key,
    )


app.add_typer(arms_app, name="arms")
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(letters_app, name="dead-letters")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """The console entry."""
    app()


def _announce(settings: Settings, running: Running) -> None:
    worker = "none (--no-worker)" if running.worker_pid is None else f"process {running.worker_pid}"
    stdout.print(
        f"metaban {version('metaban')}\n"
        f"  service    {running.url}\n"
        f"  docs       {running.url}/docs\n"
        f"  data       {settings.data_dir.resolve()}\n"
        f"  store      {running.store}\n"
        f"  namespace  {settings.namespace}\n"
        f"  worker     {worker}",
        markup=False,
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
