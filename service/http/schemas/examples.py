"""The examples in /docs. They can be sent to a new service in order, each after the ones before it.

Order: arms of the catalogue, recommendations, a batch of them, rewards, admin requests. All features of a namespace
have one form, so the examples share the arms and ids of the README's quickstart. An example with another form says
which namespace it needs.
"""

from __future__ import annotations

import json
from typing import Any, Final

MENU: Final[tuple[dict[str, Any], ...]] = (
    {"id": "espresso", "features": {"kind": "coffee", "hot": True}},
    {"id": "sencha", "features": {"kind": "tea", "hot": True}},
    {"id": "croissant", "features": {"kind": "pastry", "hot": False}},
)

SENCHA: Final = MENU[1]

#: The arms as lines of an import.
MENU_LINES: Final = "".join(json.dumps(arm, separators=(",", ":")) + "\n" for arm in MENU)

#: Namespaces to create. The layout of SHOP is fixed by its first request, that of NEWS at its creation.
SHOP: Final[dict[str, Any]] = {"name": "shop"}

NEWS: Final[dict[str, Any]] = {"name": "news", "arm_features": 3, "context_features": 2}

FIRST_ORDER: Final[dict[str, Any]] = {"decision_id": "first-order", "user_id": "ada", "arms": [*MENU]}

#: With k = 3 all arms are chosen, so the example of a reward may name any of them.
SECOND_ORDER: Final[dict[str, Any]] = {
    "decision_id": "second-order",
    "user_id": "ada",
    "arms": [*MENU],
    "k": 3,
    "user_features": {"country": "NL", "member": True},
}

FROM_CATALOGUE: Final[dict[str, Any]] = {"user_id": "ada", "exclude": ["espresso"], "k": 2}

FROM_LISTS: Final[dict[str, Any]] = {
    "user_id": "ada",
    "arms": [
        {"id": "article-17", "features": [0.2, 0.9, 0.1]},
        {"id": "article-23", "features": [0.7, 0.1, 0.4]},
    ],
    "context": [0.33, 1.0],
}

THIRD_ORDERS: Final[dict[str, Any]] = {
    "requests": [
        {"decision_id": "third-order", "user_id": "ada", "arms": [*MENU]},
        {"user_id": "ben", "arm_ids": ["espresso", "sencha"]},
    ]
}

#: Bodies of POST /admin/arms.
ARM_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    arm["id"]: {"summary": f"Add {arm['id']}", "value": arm} for arm in MENU
}

#: Bodies of POST /recommend.
RECOMMEND_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "one": {"summary": "One arm out of three", "value": FIRST_ORDER},
    "several": {"summary": "A ranking, for a user with a profile", "value": SECOND_ORDER},
    "catalogue": {
        "summary": "From the catalogue",
        "description": "The catalogue has the arms of POST /admin/arms.",
        "value": FROM_CATALOGUE,
    },
    "lists": {
        "summary": "Lists of numbers, with context: needs ?namespace=news",
        "description": "All features of a namespace have one form. This example needs `?namespace=news`, which an "
        "example of POST /admin/namespaces creates.",
        "value": FROM_LISTS,
    },
}

#: Bodies of POST /feedback.
FEEDBACK_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "one": {"summary": "One reward", "value": {"decision_id": "first-order", "reward": 1}},
    "many": {
        "summary": "Many rewards",
        "value": {
            "events": [
                {"decision_id": "second-order", "arm_id": "sencha", "reward": 1, "event_id": "click-7"},
                {"decision_id": "third-order", "reward": 0},
            ]
        },
    },
}

#: Bodies of POST /admin/transfer.
TRANSFER_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "user": {
        "summary": "A user as target, users as sources",
        "description": "Needs 30 learned rewards of the target, and some of each source.",
        "value": {"user_id": "ada", "sources": ["ben", "cleo", "dan", "eve"], "metric": "cross-entropy"},
    },
    "cluster": {
        "summary": "A cluster as target, all others as sources",
        "description": "Needs clusters of users: GET /admin/transfer shows how many there are.",
        "value": {"cluster": 0, "metric": "worst-group-accuracy"},
    },
}
