"""How long properties are looked for counterexamples of, said once for those whose examples are whole learners."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: Examples of a property that fits users of a small world each time. PROPERTY_EXAMPLES looks for longer.
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "30"))
PROPERTY = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
