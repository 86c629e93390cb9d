"""The inputs of a layer in a step, besides the hidden states.

Shapes: T tokens of a step, P size of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..layers.rope import RotaryTables


class LayerStep(NamedTuple):
    """The positions of the tokens, the tables of the layer's rotary embedding, its caches, and its own input.

    `caches` are the tensors and the metadata of the layer's KV-cache groups. `own_TP` is an input that only this layer
    gets, if it gets one. `is_repeated` is true if the layer was already computed for the same tokens. `is_canvas_T1`
    are the tokens of canvases, bool [T, 1]; None in models without canvases. `places_T1` are the places of tokens in
    their blocks, in heads whose layers read them.
    """

    positions_T: Tensor
    tables: RotaryTables | None
    caches: Sequence[tuple[Tensor, Any]]
    own_TP: Tensor | None
    is_repeated: bool = False
    is_canvas_T1: Tensor | None = None
    places_T1: Tensor | None = None
