"""The metadata of torch attention, which is computed once for a step and used in every layer.

Shapes: T tokens, G key/value heads, K head dimension, R rows (requests of a bucket), B pages of a head, P parts of the
cache, L keys, N = R * G.
"""

import msgspec
from torch import Tensor

from ..layers.window import Window
from .interface import AttentionLayer
from .torch_tiles import Tile


class DecodeBucket(msgspec.Struct, frozen=True):
    """Requests with one query each. `tokens` is None if they are the whole step, in order."""

    tokens: Tensor | None  # [R]
    pages: Tensor  # [P * R * G * B]
    index_pages: Tensor  # [R * B], or empty without index keys
    mask_N1L: Tensor
    distance_N1L: Tensor | None


class Prefill(msgspec.Struct, frozen=True):
    """One request with several queries."""

    pages: Tensor  # [P * G * B]
    index_pages: Tensor  # [B], or empty
    tiles: list[Tile]


class Masks(msgspec.Struct, frozen=True):
    """The masks of all queries: one per bucket of decoding requests, and one per tile of each prompt."""

    decodes: list[Tensor]
    tiles: list[list[Tensor]]


class TorchPagedMetadata(msgspec.Struct, weakref=True):
    """The metadata of one step in a KV-cache group: the cache rows to write, and the pages to read for each window.

    `chosen` leaves only the keys that an indexer of the group has chosen last.
    """

    cache_rows: Tensor  # [T * P * G] rows of the cache, viewed as [..., K]
    index_rows: Tensor  # [T], or empty unless index keys have their own pages
    decodes: dict[Window | None, list[DecodeBucket]]
    prefills: dict[Window | None, list[Prefill]]
    chosen: Masks | None = None

    def masks(self, layer: AttentionLayer) -> Masks:
        """Return the masks for a layer's attention, if it attends to all keys."""
        return Masks(
            [bucket.mask_N1L for bucket in self.decodes[layer.window]],
            [[tile.mask_ML for tile in prefill.tiles] for prefill in self.prefills[layer.window]],
        )
