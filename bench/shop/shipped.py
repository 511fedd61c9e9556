"""The shipped learner in the shop, as the service and the worker run it: catalogue, layout, policy, epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from metaban.bench.core.local_loop import LoopDecision
from metaban.bench.regret.methods import LearnerMethod, shipped_settings
from metaban.bench.shop.inputs import named_context, named_features
from metaban.bench.shop.player import ShopPlayer, ShownItem
from metaban.bench.worlds.shop import Places, ShopCatalogue, ShopRequest
from metaban.models.features import Named, infer_layout
from metaban.models.settings import named_settings
from metaban.service.engine.recommend.catalogue import ArmTable, EncodedArms

#: Digits of an arm id, so that arms sorted by id are in the order of their items.
ID_DIGITS: Final = 6


@final
class ShippedPlayer(ShopPlayer):
    """Preset `default` with the service's default settings; arms are the items with named features."""

    def __init__(self, catalogue: ShopCatalogue, *, seed: int, hash_dimension: int | None = None) -> None:
        """Names are hashed into so many places; None means the default."""
        described: list[Named] = (
            [{"item": f"i{identity}"} for identity in catalogue.identities.tolist()]
            if catalogue.metadata is None
            else [named_features(item) for item in catalogue.metadata]
        )
        shipped = shipped_settings()
        layout = infer_layout(
            described,
            named_context(ShopRequest(0, 0, "phone", 0)),
            products=shipped.context_products,
            intercept=shipped.intercept,
            hash_dimension=hash_dimension or shipped.hash_dimension,
            max_dimension=shipped.max_dimension,
        )
        table = ArmTable.of({f"{place:0{ID_DIGITS}}": features for place, features in enumerate(described)})
        self._arms = EncodedArms.of(table, layout, None)
        #: Ids by item; items have the ids of their categories where ids are hidden.
        self._ids = [f"{identity:0{ID_DIGITS}}" for identity in catalogue.identities.tolist()]
        method = LearnerMethod(named_settings("default", seed=seed), layout, seed=seed)
        self._loop = method.loop
        self.settings = method.settings
        self._open: dict[tuple[int, int], LoopDecision] = {}  # by slate and item

    def recommend(self, request: ShopRequest, eligible: Places, size: int) -> Places:
        inputs = self._arms.inputs(eligible, named_context(request))
        ids = [self._ids[item] for item in eligible.tolist()]
        chosen = self._loop.choose_slate(f"user-{request.user}", inputs, size, str(request.number), ids)
        shown = eligible[[decision.arm for decision in chosen]]
        self._open |= {(request.number, int(item)): made for item, made in zip(shown, chosen, strict=True)}
        return shown

    def learn(self, feedback: Sequence[ShownItem]) -> None:
        for shown in feedback:
            decision = self._open.pop((shown.request.number, shown.item))
            self._loop.learn(f"user-{shown.request.user}", decision, shown.reward)
