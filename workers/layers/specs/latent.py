"""The description of multi-head latent attention as data."""

from typing import Literal

import msgspec
from msgspec.structs import replace

from ..rope import RopeSpec

RopeOrder = Literal["half", "interleaved", "swapped"]
"""The order of a head's stored rows; see `ModelSpec`."""


class IndexerSpec(msgspec.Struct, frozen=True):
    """The indexer that chooses the keys to which a token attends (DeepSeek-V3.2, arXiv 2512.02556).

    A token has an index key of `head_dim` elements. The first of them, or the last if `rotates_last`, are rotated in
    the order `rope_order`. The norm of index keys has the epsilon `norm_eps`. The score of a key for a token is a sum
    over `num_heads` heads: the head's weight, times relu(index query . index key). A token attends to the `num_chosen`
    keys with the highest scores.

    With a `group_size` above 1, a token chooses groups of that many keys (GLM-5.3-Flash). Besides its index key, a
    token has a logit for each element of it. The index key of a group is a sum of its tokens' index keys, whose factors
    are a softmax of the logits plus a bias for each place in the group. A token attends to `num_chosen` of the groups
    that are complete, and to the keys after the last of these.

    If `norms_inputs`, index queries are products of a layer norm of the hidden state, instead of the vector from which
    queries are computed. If `has_log_scales`, each head's index query has a stored factor like that of queries; see
    `LatentSpec`.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    rope_order: RopeOrder = "half"
    rotates_last: bool = False
    norm_eps: float = 1e-6
    group_size: int = 1
    norms_inputs: bool = False
    has_log_scales: bool = False

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

    Keys and values of all heads are products of one latent vector of `kv_rank` elements. The cache contains only that
    vector, and one rotated key of `rotary_dim` elements for all heads. A head's query and key have another `plain_dim`
    elements without rotation, and its value has `value_dim`. Queries are products of a vector of `query_rank` elements,
    or of the hidden state if that is None. With an `indexer`, tokens attend only to some keys, and each index key is
    stored after the token's key. The normed latent vector is multiplied by `multiplier`. If `norms_rotated_key`, the
    rotated key is normed before its rotation.

    If `joins_query_vectors`, queries are products of the vector after its norm and before it, side by side, and so are
    the gates of attention: in one matrix, each head's rows of its query are followed by those of its gates.

    If `has_log_scales`, each head's query at position p is multiplied by a stored scale times log(p + 1) plus a stored
    bias. If `has_plain_layers`, layers without a rotary embedding have no rotated key: all elements of their queries
    are plain, and the cache has zeros instead of that key.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None
    multiplier: float = 1.0
    norms_rotated_key: bool = False
    joins_query_vectors: bool = False
    has_log_scales: bool = False
    has_plain_layers: bool = False

    @property
    def query_inputs(self) -> int:
        """The number of elements from which queries are computed; 0 if that is the hidden state."""
        return (self.query_rank or 0) * (1 + self.joins_query_vectors)

    def for_rope(self, rope: RopeSpec | None) -> "LatentSpec":
        """Return the sizes of a layer with this rotary embedding."""
        if rope is not None or not self.has_plain_layers:
            return self
        return replace(self, plain_dim=self.plain_dim + self.rotary_dim, rotary_dim=0)
