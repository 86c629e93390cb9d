"""The specification of sparse attention by blocks of keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """The indexer of MiniMax Sparse Attention (arXiv 2606.13392), which chooses blocks of keys.

    A token has one index key of `head_dim` elements, and an index query for each key/value head. They are normed, and
    rotated like the layer's keys. The score of a block of `block_size` keys is the largest product of the index query
    and one of its index keys. The query heads that share a key/value head attend to `num_chosen` blocks: to the
    token's own and those just before it, `num_local` in all, and to the blocks with the highest scores.
    """

    head_dim: int
    block_size: int
    num_chosen: int
    num_local: int

    @property
    def num_tokens(self) -> int:
        """The length of the longest sequence in which all blocks are chosen."""
        return self.block_size * self.num_chosen
