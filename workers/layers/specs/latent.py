"""The description of multi-head latent attention as data."""

from typing import Literal

import msgspec
from msgspec.structs import replace

from ..rope import RopeSpec

RopeOrder = Literal["half", "interleaved", "swapped"]
"""The order of a head's stored rows; see `ModelSpec`."""


class IndexerSpec(msgspec.Struct, frozen=True):
    """The indexer that chooses the keys to which a token attends (DeepSeek-V3.2, arXiv 2512.02556).

    The score of a key for a token is a sum over heads: the head's weight, times relu(index query . index key). A token
    attends to the keys with the highest scores.
    """

    num_heads: int
    head_dim: int
    """The number of elements of an index key."""
    num_chosen: int
    """The number of keys, or of groups of keys, to which a token attends."""
    rope_order: RopeOrder = "half"
    """The order in which elements of index keys are rotated."""
    rotates_last: bool = False
    """True if the last elements of an index key are rotated instead of the first."""
    norm_eps: float = 1e-6
    """The epsilon of the norm of index keys."""
    group_size: int = 1
    """The number of keys in a group (GLM-5.3-Flash); 1 if single keys are chosen.

    Besides its index key, a token has a logit for each element of it. The index key of a group is a sum of its tokens'
    index keys, whose factors are a softmax of the logits plus a bias for each place in the group. A token attends to
    `num_chosen` of the groups that are complete, and to the keys after the last of these.
    """
    norms_inputs: bool = False
    """True if index queries are products of a layer norm of the hidden state, not of the vector for queries."""
    has_log_scales: bool = False
    """True if each head's index query has a stored factor like that of queries; see `LatentSpec`."""

    @property
    def num_tokens(self) -> int:
        """The maximum length in tokens of a sequence whose tokens attend to all keys, because all are chosen."""
        return (self.num_chosen + 1) * self.group_size - 1

    @property
    def has_groups(self) -> bool:
        """True if tokens choose groups of several keys."""
        return self.group_size > 1

    @property
    def key_elements(self) -> int:
        """The number of elements that the cache has for a token's index key and its logits."""
        return self.head_dim * (1 + self.has_groups)


class LatentSpec(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values of all heads are products of one latent vector. The cache contains only that vector, and one rotated
    key for all heads.
    """

    query_rank: int | None
    """The size of the vector whose products are the queries; None if that is the hidden state."""
    kv_rank: int
    """The size of the latent vector."""
    plain_dim: int
    """The number of elements of a head's query and key without rotation."""
    rotary_dim: int
    """The number of their other elements, which are rotated. Those of the key are shared by all heads."""
    value_dim: int
    """The number of elements of a head's value."""
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None
    """The choice of keys; None if tokens attend to all. Each index key is stored after the token's key."""
    multiplier: float = 1.0
    """A factor on the normed latent vector."""
    norms_rotated_key: bool = False
    """True if the rotated key is normed before its rotation."""
    joins_query_vectors: bool = False
    """True if queries are products of their vector after its norm and before it, side by side.

    So are the gates of attention. In one matrix, each head's rows of its query are followed by those of its gates.
    """
    has_log_scales: bool = False
    """True if a head's query at position p is multiplied by s * log(p + 1) + b, with a stored s and b of each head."""
    has_plain_layers: bool = False
    """True if layers without a rotary embedding have no rotated key.

    All elements of their queries are plain, and the cache has zeros instead of that key.
    """

    @property
    def query_inputs(self) -> int:
        """The number of elements from which queries are computed; 0 if that is the hidden state."""
        return (self.query_rank or 0) * (1 + self.joins_query_vectors)

    def for_rope(self, rope: RopeSpec | None) -> "LatentSpec":
        """Return the sizes of a layer with this rotary embedding."""
        if rope is not None or not self.has_plain_layers:
            return self
        return replace(self, plain_dim=self.plain_dim + self.rotary_dim, rotary_dim=0)
