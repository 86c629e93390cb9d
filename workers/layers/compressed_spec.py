"""The description of compressed attention as data."""

from dataclasses import dataclass

from .latent_spec import IndexerSpec


@dataclass(frozen=True, slots=True)
class Compression:
    """The entries of a layer: keys that summarize several tokens, to which all later tokens may attend.

    Every `rate` tokens have an entry. If `overlaps`, it also summarizes the `rate` tokens before them. If
    `has_indexer`, an entry is followed by that of the indexer, its index key, which is computed in the same way. An
    entry is stored in the block of its last token. In a cache with blocks of `block_size` tokens, a block therefore has
    room for as many entries as may end in it.
    """

    rate: int
    overlaps: bool
    has_indexer: bool
    block_size: int = 1

    @property
    def span(self) -> int:
        """The number of tokens that an entry summarizes."""
        return self.rate * (1 + self.overlaps)

    def num_inputs(self, head_dim: int) -> int:
        """Return the number of elements that a token contributes to entries of `head_dim` elements."""
        return 2 * head_dim * (1 + self.overlaps)

    def entry_elements(self, head_dim: int) -> int:
        """Return the number of elements per token of a cache with entries of `head_dim` elements."""
        entries_of_block = -(-self.block_size // self.rate)
        return -(-entries_of_block * head_dim // self.block_size)


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Compressed attention (DeepSeek-V4).

    Queries are products of a vector of `query_rank` elements, and have a norm without weights. All heads share one key,
    which is also the value. The last `rotary_dim` elements of queries and keys are rotated in pairs of neighbors, and
    those of the output are rotated back. Heads form `num_groups` groups. The outputs of a group's heads are projected
    to `output_rank` elements, and those of all groups to the hidden size.

    A token attends to the last `window` tokens, itself included, and in layers with a `Compression` to entries: to
    those that the `indexer` chooses, or to all if the layer has no indexer. An entry is the normed sum of its tokens'
    vectors, each element times a softmax over the tokens, and is rotated like the key of the first of the last `rate`
    tokens.

    The inputs of entries are cached with the token's key, so that the step with an entry's last token can compute it.
    """

    query_rank: int
    rotary_dim: int
    num_groups: int
    output_rank: int
    window: int
    indexer: IndexerSpec

    def token_elements(self, head_dim: int, compression: Compression | None) -> tuple[int, ...]:
        """Return the number of elements of a token in the cache of keys, and in that of entries if there is one."""
        if compression is None:
            return (head_dim,)
        index_dim = self.indexer.head_dim if compression.has_indexer else 0
        inputs = compression.num_inputs(head_dim) + compression.num_inputs(index_dim)
        return head_dim + inputs, compression.entry_elements(head_dim + index_dim)
