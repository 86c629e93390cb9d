"""The specification of sparse attention by blocks of keys."""

import msgspec

from ..rope import RopeSpec


class BlockIndexerSpec(msgspec.Struct, frozen=True):
    """The indexer of MiniMax Sparse Attention (arXiv 2606.13392), which chooses blocks of keys.

    A token has one index key of `head_dim` elements, and an index query for each key/value head. They are normed, and
    rotated like the layer's keys. The score of a block of `block_size` keys is the largest product of the index query
    and one of its index keys. The query heads that share a key/value head attend to `num_chosen` blocks. `num_local` of
    them are the token's own block and those just before it; the others have the highest scores.

    If `num_heads` is not 0 (QSA of Qwen4), all key/value heads attend to the same blocks. A block that ends at or
    before the token has one key: the mean of its tokens' index keys, which is then normed, and rotated like the first
    of them. A token has `num_heads` index queries, and the score of a block is the sum of the positive ones of their
    products with its key. A token attends to `num_chosen` such blocks, and to the tokens after the last of them. Their
    rotation depends on `max_model_len`, the length of the longest sequence that is served. If `num_angles` is not 0,
    positions have three dimensions, so the cosines and sines of a token's angles are stored after its index key. If
    `has_two_matrices`, the checkpoint stores the projections to the queries and to the key apart.

    If `heads_per_group` is not 0 (Step 5), each key/value head has that many index queries and as many weights. A block
    has one key: a mean of its tokens' index keys, whose weights are the softmax of stored logits for each element. The
    score of a block is the weighted sum of the positive products of its key. A token attends to its own block, and to
    `num_chosen` of those before it. `rope` rotates index queries and keys.
    """

    head_dim: int
    block_size: int
    num_chosen: int
    num_local: int
    num_heads: int = 0
    max_model_len: int = 0
    num_angles: int = 0
    has_two_matrices: bool = False
    heads_per_group: int = 0
    rope: RopeSpec | None = None

    @property
    def key_elements(self) -> int:
        """The number of elements that the cache has for a token's index key, and for its rotation or its logits."""
        return self.head_dim * (1 + bool(self.heads_per_group)) + 2 * self.num_angles

    @property
    def num_tokens(self) -> int:
        """The maximum length in tokens of a sequence whose tokens attend to all blocks, because all are chosen."""
        return self.block_size * self.num_chosen
