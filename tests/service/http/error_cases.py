"""All refusals of requests: their causes and the expected answers.

`test_errors` runs them, and fails if an error of the service, the store or the documentation has no case.
"""

from __future__ import annotations

import json

from metaban.store.errors import BacklogFull, NotReplicated, StoreReset, StoreUnavailable
from tests.service.apps import PAPER
from tests.service.http.error_steps import (
    ADMIN,
    CATALOGUE,
    CLIENT,
    LINES,
    NDJSON,
    REWARD,
    SHOP,
    SHOP_ADMIN,
    SNAPSHOT,
    a_file_comes,
    a_job_runs,
    a_request_is_under_way,
    asked,
    away,
    backlog,
    began_anew,
    buried,
    buried_and_told_again,
    buried_while_others_wait,
    catalogued,
    catalogued_and_decided,
    dead,
    decided,
    deferred,
    emptied,
    endless,
    guarded_shop,
    hanging,
    kept,
    key,
    long_ago,
    misfit_shop,
    no_reward_buried,
    no_room_on_disk,
    none_may_wait,
    rewarded_often,
    shop,
    snapshots_are_verified,
    told_of_the_user,
    unannounced,
    unreadable,
)  # fmt: skip
from tests.service.http.error_world import ASK, QUICK, USER, Case, WireCase

GUARDED = {
    "client_keys": {CLIENT.digest, f"shop:{SHOP.digest}"},
    "admin_keys": {ADMIN.digest, f"shop:{SHOP_ADMIN.digest}"},
}
#: A rate so low that no token returns during a test.
NEVER = 0.001
ADMISSION = "metaban.service.http.admission"
LATE = {"metaban.service.http.admission.BODY_GRACE_S": 0.1}
TIGHT = {"max_body_bytes": 4_096, "max_import_bytes": 4_096}
LONG = b" " * 5_000
ARM, IF_NONE = {"features": [3, 2, 1]}, {"If-None-Match": "*"}

HEAD = b"POST /recommend HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
#: Refusals by the HTTP protocol, on a real connection.
WIRE = [
    WireCase("no HTTP", 400, "bad-request", b"EHLO metaban\r\n\r\n"),
    WireCase("a broken body", 400, "bad-request", CHUNKED + b"2\r\n{}\r\nnonsense\r\n"),
    WireCase("a body in tiny chunks", 400, "bad-request", CHUNKED + b"1\r\n \r\n" * 5_000),
    WireCase("long request headers", 431, "head-too-large", HEAD + b"x-long: " + b"x" * 80_000),
    WireCase("too many headers", 431, "head-too-large", HEAD + b"x-a: b\r\n" * 200 + b"\r\n"),
    WireCase("a body that does not come", 408, "body-timeout", HEAD + b"content-length: 9\r\n\r\n{", LATE),
    WireCase("a long body", 413, "body-too-large", HEAD + b"content-length: 9999999\r\n\r\n{"),
]

CASES = [
    # 400
    Case("a body that is cut off", 400, "malformed-body", "POST /recommend", b'{"user_id": "Zo'),
    Case("a body that is not UTF-8", 400, "malformed-body", "POST /feedback", b'{"decision_id": "\xff"}'),
    Case("no body", 400, "malformed-body", "PATCH /admin/config", b""),
    # 401
    Case("no key", 401, "unauthorized", "POST /recommend", ASK, settings=GUARDED),
    Case("a wrong key", 401, "unauthorized", "POST /recommend", ASK, settings=GUARDED, headers={"X-API-Key": "guess"}),
    Case("no key, and a bad body", 401, "unauthorized", "POST /feedback", b"{", settings=GUARDED),
    Case("no key for the admin's", 401, "unauthorized", "DELETE /admin/users/u", settings=GUARDED),
    Case("no key for namespaces", 401, "unauthorized", "DELETE /admin/namespaces/shop", settings=GUARDED),
    Case("no key for the metrics", 401, "unauthorized", "GET /metrics", settings=GUARDED),
    # 403
    Case("a client as admin", 403, "forbidden", "DELETE /admin/users/u", settings=GUARDED, headers=key(CLIENT)),
    Case(
        "a client of another namespace", 403, "forbidden", "POST /recommend", ASK,
        given=guarded_shop, settings=GUARDED, headers=key(SHOP),
    ),
    Case(
        "an admin of another namespace", 403, "forbidden", "PATCH /admin/config", {"epsilon": 1},
        given=guarded_shop, settings=GUARDED, headers=key(SHOP_ADMIN),
    ),
    Case(
        "admin of one namespace for all", 403, "forbidden", "DELETE /admin/namespaces/shop",
        given=guarded_shop, settings=GUARDED, headers=key(SHOP_ADMIN),
    ),
    Case("metrics with a key of one namespace", 403, "forbidden", "GET /metrics", settings=GUARDED, headers=key(SHOP)),
    # 404
    Case("a decision never made", 404, "unknown-decision", "POST /feedback", REWARD, "decision_id"),
    Case("a damaged decision", 404, "unknown-decision", "POST /feedback", REWARD, "decision_id", given=unreadable),
    Case("activate an unknown decision", 404, "unknown-decision", "POST /decisions/d/activate", blames="decision_id"),
    Case(
        "activate too late", 404, "unknown-decision", "POST /decisions/d/activate", blames="decision_id",
        given=long_ago,
    ),
    Case("no such path", 404, "not-found", "GET /recommendations"),
    Case("no such namespace", 404, "not-found", "POST /recommend?namespace=shop", ASK),
    Case("no such namespace to look at", 404, "not-found", "GET /admin/namespaces/shop"),
    Case("no such namespace to delete", 404, "not-found", "DELETE /admin/namespaces/shop"),
    Case("no such user", 404, "not-found", "GET /admin/users/nobody", given=decided),
    Case("no such arm", 404, "not-found", "GET /admin/arms/x", given=catalogued),
    Case("no such arm to remove", 404, "not-found", "DELETE /admin/arms/x", given=catalogued),
    Case("groups of an unknown arm", 404, "not-found", "GET /admin/groups?user_id=u&arm_id=x", given=decided),
    Case("groups before the first request", 404, "not-found", "POST /admin/groups", {"user_id": USER, "features": [1]}),
    Case("no such letter", 404, "not-found", "POST /admin/dead-letters/0/1-1/replay"),
    Case("no such letter to discard", 404, "not-found", "DELETE /admin/dead-letters/0/1-1"),
    Case("no such partition", 404, "not-found", "POST /admin/dead-letters/99/1-1/replay"),
    Case("no id of a letter", 404, "not-found", "DELETE /admin/dead-letters/0/+", given=buried),
    Case("no such snapshot", 404, "not-found", f"POST /admin/snapshots/{SNAPSHOT}/restore"),
    Case("no such job", 404, "not-found", "GET /admin/jobs/x"),
    Case("no such transfer job", 404, "not-found", "GET /admin/transfer/x"),
    # 405
    Case("another method", 405, "method-not-allowed", "PUT /recommend", ASK),
    Case("another method for an arm", 405, "method-not-allowed", "PATCH /admin/arms/x", {"features": [1]}),
    # 408
    Case("a body without an end", 408, "body-timeout", "POST /recommend", endless, patches=LATE),
    Case(
        "a body that takes too long", 408, "body-timeout", "POST /feedback", endless,
        patches={"metaban.service.http.parsing.BODY_TIMEOUT_S": 0.1},
    ),
    Case(
        "import that stops", 408, "body-timeout", "POST /admin/arms/import", endless, headers=NDJSON,
        patches={"metaban.service.engine.admin.arm_files.SILENCE_S": 0.1},
    ),
    Case(
        "import that takes too long", 408, "body-timeout", "POST /admin/arms/import", endless, headers=NDJSON,
        patches={"metaban.service.engine.admin.arm_files.UPLOAD_S": 0.1},
    ),
    # 409
    Case(
        "another body for a decision", 409, "decision-conflict", "POST /recommend",
        {**ASK, "decision_id": "d", "k": 2}, "decision_id", given=decided,
    ),
    Case("a reset user", 409, "user-reset", "POST /feedback", REWARD, "decision_id", given=began_anew),
    Case(
        "too many rewards", 409, "too-many-rewards", "POST /feedback", {**REWARD, "event_id": "another"}, "decision_id",
        given=rewarded_often,
    ),
    Case("not activated", 409, "not-activated", "POST /feedback", REWARD, "decision_id", given=deferred),
    Case("a snapshot during a job", 409, "job-running", "POST /admin/snapshots", given=a_job_runs),
    Case("a file during a job", 409, "job-running", "POST /admin/arms/import", LINES, given=a_job_runs, headers=NDJSON),
    Case("two files", 409, "job-running", "POST /admin/arms/import", LINES, during=a_file_comes, headers=NDJSON),
    Case("two verifications", 409, "job-running", "GET /admin/snapshots?verify=true", during=snapshots_are_verified),
    Case(
        "dead letter without a reward", 409, "not-replayable", "POST /admin/dead-letters/{partition}/{letter}/replay",
        given=no_reward_buried,
    ),
    Case(
        "dead letter sent again", 409, "not-replayable", "POST /admin/dead-letters/{partition}/{letter}/replay",
        given=buried_and_told_again,
    ),
    Case("existing arm id", 409, "arm-exists", "POST /admin/arms", CATALOGUE[0], "id", given=catalogued),
    Case(
        "another version of an arm", 409, "version-conflict", "PUT /admin/arms/arm%200?version=7", ARM, given=catalogued
    ),
    Case(
        "another ETag of an arm", 409, "version-conflict", "DELETE /admin/arms/arm%200", given=catalogued,
        headers={"If-Match": '"7"'},
    ),
    Case("version=0 of an arm", 409, "version-conflict", "PUT /admin/arms/arm%200?version=0", ARM, given=catalogued),
    Case("arm exists", 412, "precondition-failed", "PUT /admin/arms/arm%200", ARM, given=catalogued, headers=IF_NONE),
    Case("version=1 of a missing arm", 409, "version-conflict", "DELETE /admin/arms/x?version=1", given=catalogued),
    Case(
        "full catalogue", 409, "catalogue-full", "POST /admin/arms", {"id": "x", "features": [1, 2, 3]},
        given=catalogued, settings={"max_catalogue": 2},
    ),
    Case(
        "full catalogue, put", 409, "catalogue-full", "PUT /admin/arms/x", {"features": [1, 2, 3]},
        given=catalogued, settings={"max_catalogue": 2},
    ),
    Case("a name that is taken", 409, "namespace-exists", "POST /admin/namespaces", {"name": "shop"}, given=shop),
    Case("the name of the default", 409, "namespace-exists", "POST /admin/namespaces", {"name": "default"}),
    Case("a learner without warm starts", 409, "fusion-unavailable", "POST /admin/fusion", settings=PAPER),
    Case(
        "fusion that is off", 409, "fusion-unavailable", "POST /admin/fusion",
        settings={"fusion": "off"},
    ),
    Case("another revision", 409, "settings-changed", "PATCH /admin/config?revision=7", {"epsilon": 1}),
    # 413
    Case("a long body", 413, "body-too-large", "POST /recommend", LONG, settings=TIGHT),
    Case("long chunked body", 413, "body-too-large", "POST /feedback", unannounced, settings=TIGHT),
    Case("a long file", 413, "body-too-large", "POST /admin/arms/import", LONG, settings=TIGHT, headers=NDJSON),
    Case(
        "long chunked import", 413, "body-too-large", "POST /admin/arms/import", unannounced, settings=TIGHT,
        headers=NDJSON,
    ),
    # 415
    Case(
        "a form", 415, "unsupported-media", "POST /recommend", json.dumps(ASK).encode(),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ),
    Case("compressed", 415, "unsupported-media", "POST /recommend", ASK, headers={"Content-Encoding": "gzip"}),
    Case("a file as JSON", 415, "unsupported-media", "POST /admin/arms/import", LINES),
    Case(
        "a compressed file", 415, "unsupported-media", "POST /admin/arms/import", LINES,
        headers={**NDJSON, "Content-Encoding": "gzip"},
    ),
    # 421
    Case("wrong Host", 421, "wrong-host", "POST /recommend", ASK, headers={"Host": "evil.example"}),
    # 422: found by the engine; `test_bad_input` has what the schemas find
    *(
        Case(name, 422, "invalid-input", call, body, blames, given)
        for name, call, body, blames, given in (
            ("too few features", "POST /recommend", {**ASK, "arms": [{"id": "a", "features": [1]}]}, "arms[0].features",
             decided),
            ("named features", "POST /recommend", {**ASK, "arms": [{"id": "a", "features": {"x": 1}}]},
             "arms[0].features", decided),
            ("unexpected context", "POST /recommend", {**ASK, "context": [1]}, "context", decided),
            ("profile longer than the layout", "POST /recommend", {**ASK, "user_features": [1, 2, 3]}, "user_features",
             told_of_the_user),
            ("a profile by names", "POST /recommend", {**ASK, "user_features": {"x": 1}}, "user_features",
             told_of_the_user),
            ("k above the number of arms", "POST /recommend", {**ASK, "k": 5}, "k", decided),
            ("k above the number of arms left", "POST /recommend", {**ASK, "k": 4, "exclude": ["arm 1"]}, "k", decided),
            ("no catalogue", "POST /recommend", {"user_id": USER}, "arms", decided),
            ("unknown arm id", "POST /recommend", {"user_id": USER, "arm_ids": ["arm 1", "x"]}, "arm_ids[1]",
             catalogued),
            ("nothing left of the catalogue", "POST /recommend",
             {"user_id": USER, "arm_ids": ["arm 1"], "exclude": ["arm 1"]}, "exclude", catalogued),
            ("arms and the catalogue", "POST /recommend", {**ASK, "arm_ids": ["arm 1"]}, "arm_ids", catalogued),
            ("a reward out of range", "POST /feedback", {"decision_id": "d", "reward": 1.5}, "reward", decided),
            ("one reward of two out of range", "POST /feedback",
             {"events": [REWARD, {"decision_id": "d", "reward": -1}]}, "events[1].reward", decided),
            ("an arm not chosen", "POST /feedback", {**REWARD, "arm_id": "x"}, "arm_id", decided),
            ("an arm that does not fit", "POST /admin/arms", {"id": "x", "features": [1]}, "features", decided),
            ("a change that does not fit", "PUT /admin/arms/arm%200", {"features": {"x": 1}}, "features",
             catalogued_and_decided),
            ("groups: features", "POST /admin/groups", {"user_id": USER, "features": [1]}, "features", decided),
            ("reward_min above reward_max", "PATCH /admin/config", {"reward_min": 2}, "reward_min", decided),
            ("a useless default_reward", "PATCH /admin/config", {"default_reward": "none"}, "default_reward", decided),
            ("a default reward out of range", "PATCH /admin/config", {"default_reward": 2}, "default_reward", decided),
            ("a useless reward_wait_s", "PATCH /admin/config", {"reward_wait_s": 1e9}, "reward_wait_s", decided),
            ("a setting out of range", "PATCH /admin/config", {"nu": -1, "epsilon": 0.5}, "nu", decided),
            ("unknown setting", "POST /admin/namespaces", {"name": "news", "learner": {"x": 1}}, "learner",
             shop),
            ("too many arm features", "POST /admin/namespaces", {"name": "news", "arm_features": 5_000},
             "arm_features", shop),
            ("no target", "POST /admin/transfer", {"sources": ["a", "b"]}, "user_id", kept),
            ("two targets", "POST /admin/transfer", {"user_id": "a", "cluster": 0}, "user_id", kept),
            ("target without samples", "POST /admin/transfer", {"user_id": USER, "sources": ["a", "b"]},
             "user_id", kept),
            ("target with too few samples", "POST /admin/transfer", {"user_id": "few", "sources": ["a", "b"]},
             "user_id", kept),
            ("source without samples", "POST /admin/transfer", {"user_id": "a", "sources": ["b", USER]},
             "sources[1]", kept),
            ("one source", "POST /admin/transfer", {"user_id": "a", "sources": ["b"]}, "sources", kept),
            ("a source twice", "POST /admin/transfer", {"user_id": "a", "sources": ["b", "b"]}, "sources[1]", kept),
            ("a target as its source", "POST /admin/transfer", {"user_id": "a", "sources": ["b", "a"]}, "sources[1]",
             kept),
            ("no such metric", "POST /admin/transfer", {"user_id": "a", "sources": ["b", "few"], "metric": "f1"},
             "metric", kept),
            ("groups of one user", "POST /admin/transfer",
             {"user_id": "a", "sources": ["b", "few"], "metric": "demographic-parity"}, "metric", kept),
            ("no such cluster", "POST /admin/transfer", {"cluster": 1, "sources": ["a", "b"]}, "cluster", decided),
            ("no other clusters", "POST /admin/transfer", {"user_id": "a"}, "sources", kept),
            ("reserved snapshot name", "POST /admin/snapshots?name=latest", None, "name", decided),
            ("invalid audit cursor", "GET /admin/audit?cursor=0-0", None, "cursor", decided),
            ("invalid dead-letter cursor", "GET /admin/dead-letters?cursor=x", None, "cursor", buried),
            ("invalid replay cursor", "POST /admin/dead-letters/replay?cursor=x", None, "cursor", buried),
        )
    ),
    Case(
        "two versions", 422, "invalid-input", "DELETE /admin/arms/arm%200?version=1", blames="If-Match",
        given=catalogued, headers={"If-Match": '"2"'},
    ),
    Case(
        "no version", 422, "invalid-input", "PUT /admin/arms/arm%200", {"features": [3, 2, 1]}, "If-Match",
        given=catalogued, headers={"If-Match": "*"},
    ),
    Case(
        "a key with a space in it", 422, "invalid-input", "POST /feedback", REWARD, "Idempotency-Key", given=decided,
        headers={"Idempotency-Key": "a b"},
    ),
    # 429
    Case(
        "too often from an address", 429, "rate-limited", "POST /recommend", ASK, given=asked(2),
        settings={"rate_limit": NEVER, "rate_burst": 2},
    ),
    Case(
        "too often with a key", 429, "rate-limited", "POST /recommend", ASK, given=asked(2, **key(CLIENT)),
        settings={"rate_limit": NEVER, "rate_burst": 2, **GUARDED}, headers=key(CLIENT),
    ),
    Case(
        "too many unknown keys", 429, "rate-limited", "POST /recommend", ASK, given=asked(2), settings=GUARDED,
        patches={f"{ADMISSION}.UNKNOWN_KEYS_RATE": NEVER, f"{ADMISSION}.UNKNOWN_KEYS_BURST": 2},
    ),
    # 500
    Case(
        "a damaged decision is asked for again", 500, "internal", "POST /recommend", {**ASK, "decision_id": "d"},
        given=unreadable,
    ),
    # 503
    Case(
        "min_version not reached", 503, "version-not-reached", "POST /recommend", {**ASK, "min_version": 1},
        "min_version", given=decided, settings={"wait_applied_timeout_s": 0.05},
    ),
    Case(
        "an epoch before the first request", 503, "version-not-reached", "POST /recommend", {**ASK, "min_version": 1},
        "min_version", settings={"wait_applied_timeout_s": 0.05},
        # The first valid request fixes the feature layout.
        writes=frozenset({"namespace"}),
    ),
    Case(
        "a full backlog", 503, "overloaded", "POST /feedback", REWARD, given=backlog, settings={"backlog_limit": 1},
        cause=BacklogFull, retry_after=2,
    ),
    Case(
        "a full backlog for a letter", 503, "overloaded", "POST /admin/dead-letters/{partition}/{letter}/replay",
        given=buried_while_others_wait, settings={"backlog_limit": 1}, cause=BacklogFull, retry_after=2,
    ),
    Case(
        "a full backlog for all letters", 503, "overloaded", "POST /admin/dead-letters/replay",
        given=buried_while_others_wait, settings={"backlog_limit": 1}, cause=BacklogFull, retry_after=2,
    ),
    Case(
        "too many at once", 503, "overloaded", "POST /recommend", ASK, given=decided, during=a_request_is_under_way,
        settings={"max_concurrent": 1},
    ),
    Case(
        "too many long bodies", 503, "overloaded", "POST /recommend", ASK,
        patches={"metaban.service.http.admission.BODIES_BYTES": 9, "metaban.service.http.admission.BODIES": 0},
    ),
    Case(
        "too many requests to score", 503, "overloaded", "POST /recommend", ASK, given=decided,
        during=none_may_wait,
    ),
    Case(
        "too many explanations", 503, "overloaded", "POST /recommend", {**ASK, "explain": True}, given=decided,
        patches={"metaban.service.engine.model.explain.EXPLAINING_MAX": 0},
    ),
    Case(
        "too many transfer jobs", 503, "overloaded", "POST /admin/transfer", {"user_id": "a", "sources": ["b", "few"]},
        given=kept, patches={"metaban.service.engine.admin.transfer.WAITING_MAX": 0}, retry_after=10,
    ),
    Case(
        "too many groups", 503, "overloaded", "POST /admin/groups", {"user_id": USER, "features": [1, 2, 3]},
        given=decided, patches={"metaban.service.engine.model.explain.EXPLAINING_MAX": 0},
    ),
    *(
        Case(
            name, 503, "unavailable", call, body, given=given, during=during, settings=settings, patches=QUICK,
            cause=StoreUnavailable, own_store=True, headers=headers,
        )
        for name, call, body, given, during, settings, headers in (
            ("feedback: store hangs", "POST /feedback", REWARD, decided, hanging, {}, {}),
            ("recommend: store hangs", "POST /recommend", ASK, decided, hanging, {"store_outage": "refuse"}, {}),
            ("recommend: no layout, store away", "POST /recommend", ASK, shop, away, {}, {}),
            ("activate: store away", "POST /decisions/d/activate", None, deferred, away, {}, {}),
            ("put arm: store away", "PUT /admin/arms/x", {"features": [1, 2, 3]}, decided, away, {}, {}),
            ("import: store away", "POST /admin/arms/import", LINES, decided, away, {}, NDJSON),
            ("export: store away", "GET /admin/arms/export", None, catalogued, away, {}, {}),
            ("forget: store away", "DELETE /admin/users/u", None, decided, away, {}, {}),
            ("config: store away", "PATCH /admin/config", {"epsilon": 1}, decided, away, {}, {}),
            ("audit: store away", "GET /admin/audit", None, decided, away, {}, {}),
            ("stream: store away", "GET /admin/stream", None, decided, away, {}, {}),
            ("transfer: away", "POST /admin/transfer", {"user_id": "a", "sources": ["b", "c"]}, kept, away, {}, {}),
            ("replay: store away", "POST /admin/dead-letters/replay", None, buried, away, {}, {}),
            ("snapshot: store away", "POST /admin/snapshots", None, decided, away, {}, {}),
            ("restore: store away", f"POST /admin/snapshots/{SNAPSHOT}/restore", None, decided, away, {}, {}),
            ("list namespaces: store down", "GET /admin/namespaces", None, decided, dead, {}, {}),
            ("create namespace: store down", "POST /admin/namespaces", {"name": "shop"}, decided, dead, {}, {}),
            ("find namespace: store down", "POST /recommend?namespace=shop", ASK, decided, dead, {}, {}),
        )
    ),
    Case(
        "feedback: emptied store", 503, "unavailable", "POST /feedback", REWARD, given=emptied, cause=StoreReset,
        retry_after=10,
    ),
    Case(
        "recommend: emptied store, outages refused", 503, "unavailable", "POST /recommend", ASK, given=emptied,
        settings={"store_outage": "refuse"}, cause=StoreReset, retry_after=10,
    ),
    Case(
        "feedback: too few replicas", 503, "unavailable", "POST /feedback", REWARD, given=decided, cause=NotReplicated,
        settings={"durability": "replicated", "replicas": 5, "replica_wait_ms": 1},
        # The event is stored; a repeated one counts once.
        writes=frozenset({"events", "counters", "seen"}),
    ),
    Case(
        "import: disk full", 503, "unavailable", "POST /admin/arms/import", LINES, given=no_room_on_disk,
        headers=NDJSON,
    ),
    Case(
        "namespace with invalid settings", 503, "unavailable", "POST /recommend?namespace=shop", ASK,
        given=misfit_shop, own_store=True,
    ),
]  # fmt: skip
