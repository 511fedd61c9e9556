"""Number of Hypothesis examples for properties that fit whole learners."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: Examples per property; each fits the users of a small world. Set PROPERTY_EXAMPLES for a longer search.
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "30"))
PROPERTY = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
