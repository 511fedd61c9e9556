"""The `metaban` command. Heavy modules (torch, the engine, the worker) are imported by the command that needs them."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, final

import structlog
import typer
from rich.text import Text
from typer.core import TyperGroup

from metaban.service.cli.arms import arms_app
from metaban.service.cli.dead_letters import letters_app
from metaban.service.cli.snapshots import snapshot_app
from metaban.service.cli.terminal import fail, print_rows, settings_or_exit, stderr, stdout
from metaban.service.settings.environment import Settings, SettingsError, reward_rules
from metaban.service.settings.variables import HOST, PORT

if TYPE_CHECKING:
    from metaban.service.process.server import Running

LEVEL_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

#: Lines of epilogs fit into 80 columns and do not end with a backslash: typer breaks and pads longer ones, and the
#: examples are meant to be pasted.
EPILOG: Final = """
[bold]Examples[/bold]

  metaban serve                   # service, worker, private Valkey, ./data

  METABAN_DATA_DIR=/srv/metaban metaban serve   # with the state elsewhere

  REDIS_URL=redis://localhost metaban serve     # with a Redis of your own

  metaban demo                    # watch it learn from simulated users

  metaban key                     # a key for clients, and its digest

  metaban doctor                  # check this machine and the settings

Commands that read the store work on the namespace of METABAN_NAMESPACE.
/docs of the service lists all HTTP calls. Settings are environment variables;
`metaban settings` lists them.
"""

#: Entry points of this group are Typer applications; each is a command of its name.
COMMANDS_GROUP: Final = "metaban.commands"


@final
class CommandGroup(TyperGroup):
    """The commands of this module, then those of entry points, which are loaded when they are used or listed."""

    # Any: older Typer has click's classes in these signatures, newer Typer has its own.
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group=COMMANDS_GROUP).names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (command := super().get_command(ctx, cmd_name)) is not None:
            return command
        for found in entry_points(group=COMMANDS_GROUP, name=cmd_name):
            loaded = typer.main.get_command(found.load())
            loaded.name = cmd_name
            return loaded
        return None


app = typer.Typer(
    name="metaban",
    cls=CommandGroup,
    help="Online recommendations from neural bandits: ask which arm to show, send the reward, get better answers.",
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


Host = Annotated[str, typer.Option(envvar=HOST.variable, help=HOST.meaning)]

Port = Annotated[int, typer.Option(envvar=PORT.variable, min=0, max=65535, help=PORT.meaning)]


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

Ctrl-C and SIGTERM stop in this order: for METABAN_DRAIN_S requests are still
served while /health/ready fails (a second signal skips this), requests in
progress are finished, then the worker and the private Valkey stop.
"""
)
def serve(
    host: Host = HOST.default,
    port: Port = int(PORT.default),
    worker: Annotated[
        bool, typer.Option("--worker/--no-worker", help="Also run a worker, which learns from rewards.")
    ] = True,
) -> None:
    """Serve recommendations over HTTP."""
    settings = settings_or_exit()
    from metaban.service.process.server import ServeError, serve
    from metaban.service.settings.variables import warn_of_unknown_variables
    from metaban.service.telemetry.logging import configure_logging
    from metaban.store.errors import StoreError

    configure_logging(settings.log_format, settings.log_level)
    warn_of_unknown_variables()
    try:
        serve(settings, host, port, with_worker=worker, announce=lambda running: _announce(settings, running))
    except (ServeError, SettingsError, StoreError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("stopped during the start")


@app.command()
def worker() -> None:
    """Learn from the rewards of all namespaces, without serving requests.

    Needs REDIS_URL. Any number of workers and of `metaban serve --no-worker` may share one store.
    """
    settings = settings_or_exit()
    if settings.redis_url is None:
        fail("set REDIS_URL; `metaban serve` already runs a worker for its private Valkey")
    from metaban.service.process.server import raise_descriptor_limit
    from metaban.service.settings.namespace import warn_of_differences
    from metaban.service.settings.variables import warn_of_unknown_variables
    from metaban.service.telemetry.logging import configure_logging
    from metaban.store.errors import StoreError, StoreReset
    from metaban.store.processes import end_with_parent
    from metaban.worker.namespace import WorkerSettings
    from metaban.worker.process import run_worker

    configure_logging(settings.log_format, settings.log_level)
    warn_of_unknown_variables()
    end_with_parent()
    raise_descriptor_limit()
    try:
        warn_of_differences(settings, settings.redis_url)
        run_worker(
            settings.redis_url,
            WorkerSettings(
                backlog_limit=settings.backlog_limit,
                samples_kept=settings.samples_kept,
                candidate_pool=settings.candidate_pool,
                rewards=reward_rules(settings),
                device=settings.device,
                torch_threads=settings.torch_threads,
                fusion=settings.fusion,
                fusion_interval_s=settings.fusion_interval_s,
                fusion_growth=settings.fusion_growth,
                fusion_min_sources=settings.fusion_min_sources,
                user_retention_days=settings.user_retention_days,
            ),
        )
    except StoreReset as error:
        structlog.get_logger().error(
            "store_reset", reason=str(error), effect="the worker ends; start it again to work with the store as it is"
        )
        raise typer.Exit(1) from None
    except StoreError as error:
        fail(str(error))


@app.command()
def doctor(host: Host = HOST.default, port: Port = int(PORT.default)) -> None:
    """Check whether the service can run here. Exits with 1 when a check fails."""
    settings = settings_or_exit()
    from metaban.service.cli.doctor import collect

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
    """Generate a key for clients or admins. The service gets only its digest; the key is shown once."""
    from metaban.service.http.auth import FreshKey

    fresh = FreshKey.generate()
    stdout.print(f"key     {fresh.key}\ndigest  {fresh.digest}", markup=False)
    stderr.print(
        "\nClients send the key in the X-API-Key header. Give the service its digest (several separated by commas):\n"
        f"  METABAN_CLIENT_KEYS={fresh.digest}\n"
        "or METABAN_ADMIN_KEYS for an admin key. The key is valid for all namespaces; for a single one put its name\n"
        "and a colon before the digest.",
        markup=False,
    )


@app.command("settings")
def show_settings() -> None:
    """List all settings: variable, current value and meaning. Secrets are not shown."""
    from metaban.service.settings.variables import setting_rows

    rows = list(setting_rows(settings_or_exit()))
    print_rows(("variable", "value", "meaning"), rows, unbroken={"variable"})


@app.command(
    epilog="""
[bold]The world[/bold]

  Items are points on a sphere. Users belong to three hidden groups (50 %,
  30 % and 20 % of them). A group likes items near one of its two favourite
  points, which is not linear in the features, and only the rewards tell the
  groups apart. Most users arrive during the demo. A random policy plays the
  same rounds for comparison.

The demo runs in a namespace of its own, which is deleted at the end. The same
--seed makes the same world; the decisions also depend on when the worker has
learned each reward.
"""
)
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of the service. Default: http://127.0.0.1:8000 or, when nothing answers there, a private "
            "service that is started for the demo."
        ),
    ] = None,
    users: Annotated[int, typer.Option(min=4, max=100_000, help="Simulated users.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, max=10_000_000, help="Decisions, each with its reward.")] = 1_500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the world and of the rewards.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a plot (PNG) to this file.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Use this existing namespace and keep it.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="METABAN_KEY", help="Admin key of the service, if it needs one.")
    ] = None,
) -> None:
    """Watch the service learn from simulated users with hidden tastes, over HTTP."""
    from metaban.service.cli.demo import run_demo
    from metaban.service.process.local_deployment import Deployment

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


def main() -> None:
    """The console entry point."""
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
