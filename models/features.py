"""Features of a request as vectors: the learner's input x = [arm, context, arm × context, 1], and profiles of users.

Lists of numbers are used as they are. Named values are hashed into a fixed number of places with a random sign, so that
collisions cancel on average (Weinberger et al., 2009): a number is added at the place of its name, a boolean counts as
0 or 1, a string adds 1 at the place of "name=value". Products let a linear head rank arms by context; the constant
replaces the biases that Eq. 9 of the Meta-Ban paper omits. A profile (`user_features`) is treated like an arm, without
context, products and constant. The first request of a namespace fixes its layout, the first profile that of profiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Named: TypeAlias = Mapping[str, float | str | bool]

Features: TypeAlias = Sequence[float] | Named

Vectors: TypeAlias = NDArray[np.float32]

#: Size of the hash cache.
HASHES_CACHED: Final = 65_536

#: Names shown for one place; hundreds may share it when many features are hashed into few places.
NAMES_SHOWN: Final = 5

#: Message for numbers that are finite on their own but overflow when added or multiplied.
TOO_LARGE: Final = "makes inputs too large for the learner: scale the numbers down"

#: What to do about features of another form than those of the first request.
FORM_IS_FIXED: Final = (
    "To use another form, create another namespace, or delete this one with DELETE /admin/namespaces/{name}."
)

#: Path of a profile in a request.
PROFILE_FIELD: Final = ("user_features",)

#: Largest dimension of a profile.
PROFILE_MAX: Final = 256

#: Places for the named values of a profile.
PROFILE_HASH_DIMENSION: Final = 32


@final
class FeatureError(ValueError):
    """Features that do not fit the layout; `field` is their path in the request."""

    def __init__(self, field: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@final
@dataclass(frozen=True, slots=True)
class InputParts:
    """What a learner tells apart in its inputs of `count` numbers.

    The first `arm` numbers describe the arm, the next `context` ones the request. Where named features are hashed, most
    places stay empty.
    """

    count: int
    arm: int
    context: int = 0
    hashed: bool = False

    @classmethod
    def of(cls, inputs: int | InputParts) -> InputParts:
        """A number means inputs that all describe the arm."""
        return cls(inputs, inputs) if isinstance(inputs, int) else inputs


@final
@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """The layout of a namespace's inputs; fixed once it has events."""

    arm: int
    context: int
    arm_named: bool
    context_named: bool
    products: bool
    intercept: bool

    @property
    def dimension(self) -> int:
        """Length of x."""
        return self.arm + self.context + self.products * self.arm * self.context + self.intercept

    @property
    def parts(self) -> InputParts:
        """What a learner tells apart; it need not multiply arm and context where x has their products."""
        return InputParts(self.dimension, self.arm, 0 if self.products else self.context, self.arm_named)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a namespace's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore the result of `to_json`."""
        return cls(**values)


def infer_layout(
    arms: Sequence[Features],
    context: Features | None,
    *,
    products: bool,
    intercept: bool,
    hash_dimension: int,
    max_dimension: int,
) -> FeatureLayout:
    """The layout that a namespace's first request implies."""
    first = arms[0]
    layout = FeatureLayout(
        arm=hash_dimension if isinstance(first, Mapping) else len(first),
        context=0 if context is None else hash_dimension if isinstance(context, Mapping) else len(context),
        arm_named=isinstance(first, Mapping),
        context_named=isinstance(context, Mapping),
        products=products and context is not None,
        intercept=intercept,
    )
    if layout.dimension > max_dimension:
        raise FeatureError(
            ("arms", 0, "features"),
            f"arm, context and their products make {layout.dimension} inputs, more than the {max_dimension} allowed",
        )
    return layout


def assemble(layout: FeatureLayout, arms: Sequence[Features], context: Features | None) -> Vectors:
    """The learner's inputs for all arms of a request: float32 [k, dimension], all finite."""
    return join_context(layout, arm_vectors(layout, arms), context)


def join_context(layout: FeatureLayout, vectors: Vectors, context: Features | None) -> Vectors:
    """The same from the result of `arm_vectors`."""
    inputs = np.ones((len(vectors), layout.dimension), dtype=np.float32)  # the last column is the intercept
    inputs[:, : layout.arm] = vectors
    if layout.context:
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is refused below
            row = _context_vector(layout, context)
            if not np.isfinite(row).all():
                raise FeatureError(("context",), TOO_LARGE)
            described = layout.arm + layout.context
            inputs[:, layout.arm : described] = row
            if layout.products:
                crossed = vectors[:, :, None] * row  # [k, arm, context]
                inputs[:, described : described + crossed[0].size] = crossed.reshape(len(vectors), -1)
    elif context is not None:
        raise FeatureError(
            ("context",), f"this namespace takes no context: its first request had none. {FORM_IS_FIXED}"
        )
    finite = np.isfinite(inputs)
    if not finite.all():
        raise FeatureError(("arms", int(finite.all(axis=1).argmin()), "features"), TOO_LARGE)
    return inputs


def arm_vectors(layout: FeatureLayout, arms: Sequence[Features]) -> Vectors:
    """The part of the inputs that depends on the arms alone: float32 [k, layout.arm], not checked for overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _arm_vectors(layout, arms)


def check_fit(layout: FeatureLayout, features: Features) -> None:
    """Raise FeatureError for the field `features` if an arm does not fit the layout."""
    try:
        if np.isfinite(arm_vectors(layout, [features])).all():
            return
    except FeatureError as error:
        raise FeatureError(("features",), error.message) from None
    raise FeatureError(("features",), TOO_LARGE)


@final
class InputNames:
    """Names of the input columns of one request, as the client calls them."""

    def __init__(self, layout: FeatureLayout, context: Features | None) -> None:
        self._layout = layout
        self._context = _PlaceNames(context or {}, layout.context, "context")

    def of(self, arm: Features, columns: Iterable[int]) -> list[tuple[str, float]]:
        """The names of some columns of an arm, each with its hash sign.

        Names hashed to one place share a column and the sign of the first name. A column of a list, or a place without
        a name, is named by its number.
        """
        layout, arms, contexts = self._layout, _PlaceNames(arm, self._layout.arm, "arm").of, self._context.of
        named = []
        for column in columns:
            if column < layout.arm:
                named.append(arms(column))
            elif (place := column - layout.arm) < layout.context:
                named.append(contexts(place))
            elif (place := place - layout.context) < layout.products * layout.arm * layout.context:
                (first, sign), (second, other) = arms(place // layout.context), contexts(place % layout.context)
                named.append((f"{first} × {second}", sign * other))
            else:
                named.append(("intercept", 1.0))
        return named

    def present(self, arm: Features) -> NDArray[np.bool_]:
        """Which columns, without the intercept, are of features that the arm and the context have.

        The others are of names that only other arms or contexts have; which ones, hashing does not tell.
        """
        arms, contexts = _PlaceNames(arm, self._layout.arm, "arm").present(), self._context.present()
        parts = [arms, contexts]
        if self._layout.products:
            parts.append((arms[:, None] & contexts).ravel())
        return np.concatenate(parts)


@final
class _PlaceNames:
    """Names and signs of the places of an arm or a context."""

    def __init__(self, values: Features, places: int, kind: str) -> None:
        self._places = places
        self._kind = kind
        self._is_list = not isinstance(values, Mapping)
        self._texts: dict[int, list[str]] = {}
        self._signs: dict[int, float] = {}
        if isinstance(values, Mapping):
            for name, value in values.items():
                text = f"{name}={value}" if isinstance(value, str) else name
                place, sign = _place(text, places)
                self._texts.setdefault(place, []).append(text)
                self._signs.setdefault(place, sign)

    def of(self, place: int) -> tuple[str, float]:
        """The name and sign of a place."""
        if place not in self._texts:
            return f"{self._kind}[{place}]", 1.0
        texts = self._texts[place]
        more = ["…"] if len(texts) > NAMES_SHOWN else []
        return " | ".join(texts[:NAMES_SHOWN] + more), self._signs[place]

    def present(self) -> NDArray[np.bool_]:
        """Which places have a value: all of a list, the named ones of an object."""
        found = np.full(self._places, self._is_list)
        found[list(self._texts)] = True
        return found


def _arm_vectors(layout: FeatureLayout, arms: Sequence[Features]) -> Vectors:
    if not layout.arm_named:
        try:
            vectors = np.asarray(arms, dtype=np.float32)
        except (TypeError, ValueError):  # objects, or lists of different lengths: the loop below finds the arm
            pass
        else:
            if vectors.shape == (len(arms), layout.arm):
                return vectors
    for index, arm in enumerate(arms):
        if isinstance(arm, Mapping) != layout.arm_named:
            wanted = "an object of named values" if layout.arm_named else f"a list of {layout.arm} numbers"
            raise FeatureError(("arms", index, "features"), f"this namespace takes {wanted}. {FORM_IS_FIXED}")
        if not layout.arm_named and len(arm) != layout.arm:
            raise FeatureError(
                ("arms", index, "features"),
                f"this namespace takes {layout.arm} numbers, not {len(arm)}. {FORM_IS_FIXED}",
            )
    return np.stack([_hashed(arm, layout.arm) for arm in arms if isinstance(arm, Mapping)])


def _context_vector(layout: FeatureLayout, context: Features | None) -> Vectors:
    wanted = "an object of named values" if layout.context_named else f"a list of {layout.context} numbers"
    if context is None:
        raise FeatureError(("context",), f"this namespace needs a context: {wanted}. {FORM_IS_FIXED}")
    if isinstance(context, Mapping) != layout.context_named:
        raise FeatureError(("context",), f"this namespace takes {wanted}. {FORM_IS_FIXED}")
    if isinstance(context, Mapping):
        return _hashed(context, layout.context)
    if len(context) != layout.context:
        raise FeatureError(
            ("context",), f"this namespace takes {layout.context} numbers, not {len(context)}. {FORM_IS_FIXED}"
        )
    return np.asarray(context, dtype=np.float32)


def _hashed(values: Named, places: int) -> Vectors:
    vector = np.zeros(places, dtype=np.float32)
    for name, value in values.items():
        if isinstance(value, str):
            place, sign = _place(f"{name}={value}", places)
            vector[place] += sign
        else:
            place, sign = _place(name, places)
            vector[place] += sign * float(value)
    return vector


@lru_cache(maxsize=HASHES_CACHED)
def _place(text: str, places: int) -> tuple[int, float]:
    """Place and sign of a name; the same in every process and version."""
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return (digest >> 1) % places, 1.0 if digest & 1 else -1.0


def infer_profile_layout(features: Features) -> FeatureLayout:
    """The layout implied by the first profile of a namespace."""
    if not isinstance(features, Mapping) and len(features) > PROFILE_MAX:
        raise FeatureError(PROFILE_FIELD, f"holds {len(features)} numbers; at most {PROFILE_MAX} are allowed")
    return infer_layout(
        [features],
        None,
        products=False,
        intercept=False,
        hash_dimension=PROFILE_HASH_DIMENSION,
        max_dimension=PROFILE_MAX,
    )


def profile_vector(layout: FeatureLayout, features: Features) -> NDArray[np.float64]:
    """A profile as a vector: float64 [layout.dimension], finite in float32; FeatureError otherwise."""
    try:
        vector: NDArray[np.float64] = arm_vectors(layout, [features])[0].astype(np.float64)
    except FeatureError as error:
        raise FeatureError(PROFILE_FIELD, error.message) from None
    if not np.isfinite(vector).all():
        raise FeatureError(PROFILE_FIELD, TOO_LARGE)
    return vector
