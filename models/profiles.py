"""Profiles of users as numbers: what a namespace's first `user_features` look like, all of them have to.

Lists of numbers are taken as they are, named values are hashed, both as those of arms are, see `models.features`. There
is no constant, no context and no product: what a profile means is for a fusion model to learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.features import TOO_LARGE, FeatureError, FeatureLayout, Features, arm_vectors, infer_layout

#: Where in a request a profile stands.
FIELD: Final = ("user_features",)
#: Numbers that a profile may have.
PROFILE_MAX: Final = 256
#: Places that named values are hashed into.
PROFILE_HASH_DIMENSION: Final = 32


def infer_profile_layout(features: Features) -> FeatureLayout:
    """The layout that the first profile of a namespace implies."""
    if not isinstance(features, Mapping) and len(features) > PROFILE_MAX:
        raise FeatureError(FIELD, f"holds {len(features)} numbers; at most {PROFILE_MAX} are allowed")
    return infer_layout(
        [features],
        None,
        products=False,
        intercept=False,
        hash_dimension=PROFILE_HASH_DIMENSION,
        max_dimension=PROFILE_MAX,
    )


def profile_vector(layout: FeatureLayout, features: Features) -> NDArray[np.float64]:
    """A profile as numbers: float64 [layout.dimension], all finite and within float32; FeatureError otherwise."""
    try:
        vector: NDArray[np.float64] = arm_vectors(layout, [features])[0].astype(np.float64)
    except FeatureError as error:
        raise FeatureError(FIELD, error.message) from None
    if not np.isfinite(vector).all():
        raise FeatureError(FIELD, TOO_LARGE)
    return vector
