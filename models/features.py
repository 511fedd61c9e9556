"""From what a client sends to what a learner sees: x = [arm, context, arm × context, 1].

Arms and contexts are lists of numbers, taken as they are, or objects of named values, hashed into a fixed number of
places with a sign that makes collisions cancel on average (Weinberger et al., 2009): a number adds itself at the place
of its name, a boolean counts as 0 or 1, a string adds 1 at the place of "name=value". Products let a linear head rank
arms by context; the constant stands in for the biases that Eq. 9 does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Named: TypeAlias = Mapping[str, float | str | bool]
Features: TypeAlias = Sequence[float] | Named
Vectors: TypeAlias = NDArray[np.float32]

#: Hashed places remembered; names and categories beyond it are hashed again.
HASHES_REMEMBERED = 65_536
#: Names told of one place; hundreds may share it where many features are hashed into few places.
NAMES_TOLD = 5
#: What is said of numbers that fit by themselves, and not when they are added or multiplied.
TOO_LARGE = "makes inputs too large for the learner: scale the numbers down"


@final
class FeatureError(ValueError):
    """Features that do not fit; `field` is the path to them in the request."""

    def __init__(self, field: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@final
@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """How the inputs of a namespace are laid out; fixed while it has events."""

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

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a namespace's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restore what `to_json` wrote."""
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
    """The learner's inputs for every arm of a request: float32 [k, dimension], all finite."""
    return join_context(layout, arm_vectors(layout, arms), context)


def join_context(layout: FeatureLayout, vectors: Vectors, context: Features | None) -> Vectors:
    """The same from what `arm_vectors` made of the arms."""
    inputs = np.ones((len(vectors), layout.dimension), dtype=np.float32)  # the last column is the intercept's
    inputs[:, : layout.arm] = vectors
    if layout.context:
        with np.errstate(over="ignore", invalid="ignore"):  # sums and products may leave float32: refused below
            row = _context_vector(layout, context)
            if not np.isfinite(row).all():
                raise FeatureError(("context",), TOO_LARGE)
            described = layout.arm + layout.context
            inputs[:, layout.arm : described] = row
            if layout.products:
                crossed = vectors[:, :, None] * row  # [k, arm, context]
                inputs[:, described : described + crossed[0].size] = crossed.reshape(len(vectors), -1)
    elif context is not None:
        raise FeatureError(("context",), "this namespace takes no context: its first request had none")
    finite = np.isfinite(inputs)
    if not finite.all():
        raise FeatureError(("arms", int(finite.all(axis=1).argmin()), "features"), TOO_LARGE)
    return inputs


def arm_vectors(layout: FeatureLayout, arms: Sequence[Features]) -> Vectors:
    """The part of the inputs that depends on the arms alone: float32 [k, layout.arm], finite or not."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _arm_vectors(layout, arms)


def check_fit(layout: FeatureLayout, features: Features) -> None:
    """FeatureError, of the field `features`, unless an arm fits the layout by itself."""
    try:
        if np.isfinite(arm_vectors(layout, [features])).all():
            return
    except FeatureError as error:
        raise FeatureError(("features",), error.message) from None
    raise FeatureError(("features",), TOO_LARGE)


@final
class InputNames:
    """What a client calls the columns of the inputs that `assemble` makes of one request."""

    def __init__(self, layout: FeatureLayout, context: Features | None) -> None:
        self._layout = layout
        self._context = _named_places(context or {}, layout.context, "context")

    def of(self, arm: Features, columns: Iterable[int]) -> list[tuple[str, float]]:
        """The names of some columns of an arm, and the sign with which each stands there.

        Names that were hashed to one place share it, with the sign of the first; a place that no name of this request
        was hashed to is called by its number, as those of lists are.
        """
        layout, arms, contexts = self._layout, _named_places(arm, self._layout.arm, "arm"), self._context
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


def _named_places(values: Features, places: int, kind: str) -> Callable[[int], tuple[str, float]]:
    """What stands for each place of an arm or a context, and with which sign."""
    texts: dict[int, list[str]] = {}
    signs: dict[int, float] = {}
    if isinstance(values, Mapping):
        for name, value in values.items():
            text = f"{name}={value}" if isinstance(value, str) else name
            place, sign = _place(text, places)
            texts.setdefault(place, []).append(text)
            signs.setdefault(place, sign)

    def named(place: int) -> tuple[str, float]:
        if place not in texts:
            return f"{kind}[{place}]", 1.0
        more = ["…"] if len(texts[place]) > NAMES_TOLD else []
        return " | ".join(texts[place][:NAMES_TOLD] + more), signs[place]

    return named


def _arm_vectors(layout: FeatureLayout, arms: Sequence[Features]) -> Vectors:
    if not layout.arm_named:
        try:
            vectors = np.asarray(arms, dtype=np.float32)
        except (TypeError, ValueError):  # objects, or lists of different lengths: said below of which arm
            pass
        else:
            if vectors.shape == (len(arms), layout.arm):
                return vectors
    for index, arm in enumerate(arms):
        if isinstance(arm, Mapping) != layout.arm_named:
            wanted = "an object of named values" if layout.arm_named else f"a list of {layout.arm} numbers"
            raise FeatureError(("arms", index, "features"), f"this namespace takes {wanted}")
        if not layout.arm_named and len(arm) != layout.arm:
            raise FeatureError(
                ("arms", index, "features"), f"this namespace takes {layout.arm} numbers, not {len(arm)}"
            )
    return np.stack([_hashed(arm, layout.arm) for arm in arms if isinstance(arm, Mapping)])


def _context_vector(layout: FeatureLayout, context: Features | None) -> Vectors:
    wanted = "an object of named values" if layout.context_named else f"a list of {layout.context} numbers"
    if context is None:
        raise FeatureError(("context",), f"this namespace needs a context: {wanted}")
    if isinstance(context, Mapping) != layout.context_named:
        raise FeatureError(("context",), f"this namespace takes {wanted}")
    if isinstance(context, Mapping):
        return _hashed(context, layout.context)
    if len(context) != layout.context:
        raise FeatureError(("context",), f"this namespace takes {layout.context} numbers, not {len(context)}")
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


@lru_cache(maxsize=HASHES_REMEMBERED)
def _place(text: str, places: int) -> tuple[int, float]:
    """Where a name goes, and with which sign: the same in every process and version."""
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return (digest >> 1) % places, 1.0 if digest & 1 else -1.0
