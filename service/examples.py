"""The story that the examples of the API's document tell, so that each can be sent after the ones before it.

A namespace takes features of one form, so all have the menu, the names and the ids of the quickstart in the README. In
order: the arms of the catalogue, recommendations, a batch of them, rewards, and what administrators ask. What shows
another form says which namespace it is for, and the example that makes that namespace.
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
#: As an import takes them.
MENU_LINES: Final = "".join(json.dumps(arm, separators=(",", ":")) + "\n" for arm in MENU)

#: The namespaces to make: one that looks as its first request does, and one of which it is said beforehand.
SHOP: Final[dict[str, Any]] = {"name": "shop"}
NEWS: Final[dict[str, Any]] = {"name": "news", "arm_features": 3, "context_features": 2}

FIRST_ORDER: Final[dict[str, Any]] = {"decision_id": "first-order", "user_id": "ada", "arms": [*MENU]}
#: Whatever is chosen first, all arms are: a reward may name any of them.
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

#: What POST /admin/arms takes.
ARM_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    arm["id"]: {"summary": f"Offer {arm['id']}", "value": arm} for arm in MENU
}
#: What POST /recommend takes.
RECOMMEND_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "one": {"summary": "One of these arms", "value": FIRST_ORDER},
    "several": {"summary": "A ranking, for a user of whom something is known", "value": SECOND_ORDER},
    "catalogue": {
        "summary": "From the catalogue",
        "description": "Its arms are those of POST /admin/arms.",
        "value": FROM_CATALOGUE,
    },
    "lists": {
        "summary": "Lists of numbers, with context: needs ?namespace=news",
        "description": "All features of a namespace are of one form. This is for one of lists: `?namespace=news`, as "
        "made by the example of POST /admin/namespaces.",
        "value": FROM_LISTS,
    },
}
#: What POST /feedback takes.
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
#: What POST /admin/transfer takes.
TRANSFER_EXAMPLES: Final[dict[str, dict[str, Any]]] = {
    "user": {
        "summary": "For a user, by users",
        "description": "When 30 rewards of the target are learned, and some of each source.",
        "value": {"user_id": "ada", "sources": ["ben", "cleo", "dan", "eve"], "metric": "cross-entropy"},
    },
    "cluster": {
        "summary": "For a cluster, by all others",
        "description": "When clusters of users are told apart: GET /admin/transfer shows how many.",
        "value": {"cluster": 0, "metric": "worst-group-accuracy"},
    },
}
