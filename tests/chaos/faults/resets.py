"""Users forgotten and snapshots restored while events are in progress."""

from __future__ import annotations

import re
import signal
from urllib.parse import quote

import httpx

from tests.chaos.clients import Client, Event, SentEvents
from tests.chaos.deployment import WAIT_TIMEOUT_S, Deployment
from tests.chaos.run import Run
from tests.chaos.store_audit import wait_drained

USERS = 6


def forget_users(run: Run) -> None:
    """DELETE /admin/users/{id} with events pending, waiting and not yet sent: none has an effect."""
    sent = SentEvents(may_reset=True)
    forgotten = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        with run.load(deployment, sent):
            while run.going() or forgotten < 4:
                user = f"victim-{run.rng.randrange(USERS)}"
                _forget_one(run, deployment, client, user, stalled=forgotten % 2 == 0)
                forgotten += 1
        client.close()
        run.audit_store(deployment, sent)
    run.note(f"{forgotten} users forgotten with events under way")


def _forget_one(run: Run, deployment: Deployment, client: Client, user: str, *, stalled: bool) -> None:
    earlier = [event for event in client.sent.acknowledged() if event.user_id == user]
    told = _events(client, user, 3)
    late = _events(client, user, 1)
    if stalled:
        for worker in deployment.workers:
            worker.send(signal.SIGSTOP)
    client.send(told)
    answer = httpx.delete(f"{run.rng.choice(deployment.urls())}/admin/users/{quote(user, safe='')}", timeout=30)
    for worker in deployment.workers:
        worker.send(signal.SIGCONT)
    run.expect(answer.is_success, f"forgetting {user} was answered with {answer.status_code}: {answer.text[:200]}")
    for event in late:
        client.send([event])
    for event in (*earlier, *told, *late):
        event.acknowledged_at, event.void = None, True
    client.send(_events(client, user, 2))


def restore_snapshot(run: Run) -> None:
    """`metaban snapshot restore` with events in progress: rewards sent since the snapshot have no effect."""
    sent = SentEvents(may_reset=True)
    restored = 0
    with run.deployment(workers=2) as deployment:
        deployment.start()
        client = Client(sent, deployment.urls, run.rng)
        while run.going() or not restored:
            _send_for_all_users(client)
            wait_drained(deployment.valkey.client)
            kept = set(sent.events)
            status, said = _metaban(deployment, "snapshot", "create")
            found = re.search(r"^\d{8}T\d{6}Z-\w+", said, re.MULTILINE)
            if status != 0 or found is None:
                raise RuntimeError(f"no snapshot was made: {said[-400:]}")
            _send_for_all_users(client)
            late = [event for number in range(USERS) for event in _events(client, f"u{number}", 1)]
            status, said = _metaban(deployment, "snapshot", "restore", found.group(), "--yes")
            run.expect(status == 0, f"the restore ended with {status}: {said[-400:]}")
            for event in late:
                client.send([event])
            for event in sent.events.values():
                if event.event_id not in kept:
                    event.acknowledged_at, event.void = None, True
            _send_for_all_users(client)
            restored += 1
        client.close()
        run.audit_store(deployment, sent)
    run.note(f"{restored} restores with events under way")


def _events(client: Client, user: str, decisions: int) -> list[Event]:
    return [event for _ in range(decisions) for event in client.events_of(client.recommend(user))]


def _send_for_all_users(client: Client) -> None:
    for number in range(USERS):
        client.send(_events(client, f"u{number}", 2))


def _metaban(deployment: Deployment, *arguments: str) -> tuple[int, str]:
    """Run a command; returns its exit status and output."""
    log = deployment.folder / f"{'-'.join(arguments[:2])}.log"
    log.unlink(missing_ok=True)
    environment = {**deployment.settings, "REDIS_URL": deployment.store_url}
    child = deployment.fork_server.spawn(arguments, environment, log)
    if not child.wait(WAIT_TIMEOUT_S):
        raise RuntimeError(f"metaban {' '.join(arguments)} does not end")
    return child.status or 0, log.read_text(errors="replace")
