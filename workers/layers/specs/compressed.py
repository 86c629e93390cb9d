"""The description of compressed attention as data."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from .latent import IndexerSpec


class Compression(msgspec.Struct, frozen=True):
    """The entries of a layer: keys that summarize several tokens, to which all later tokens may attend.

    Every `rate` tokens have an entry. If `overlaps`, it also summarizes the `rate` tokens before them. If
    `has_indexer`, an entry is followed by that of the indexer, its index key, which is computed in the same way. An
    entry is stored in the block of its last token. In a cache with blocks of `block_size` tokens, a block therefore has
    room for as many entries as may end in it.

    A layer with a `source` reads the entries of that layer. A layer that does not `choose` attends to the entries that
    the last layer which does chose. If `keeps_candidates`, the layer also chooses blocks of entries, among which the
    layers with it as `candidate_source` choose.

    If `derives_index_keys` (DeepSeek-V4.1), an index key is a normed product of the entry before its rotation, the
    logits of tokens have no biases, and tokens have none if each has its own entry.

    The entries of all layers are divided into parts, each with its own blocks. Those of this layer are in the part with
    the number `part`, and begin at the element `first_element` * `block_size` of each block.
    """

    rate: int
    overlaps: bool
    has_indexer: bool
    chooses: bool = True
    source: int | None = None
    keeps_candidates: bool = False
    candidate_source: int | None = None
    derives_index_keys: bool = False
    block_size: int = 1
    part: int = 0
    first_element: int = 0

    @property
    def span(self) -> int:
        """The number of tokens that an entry summarizes."""
        return self.rate * (1 + self.overlaps)

    @property
    def has_logits(self) -> bool:
        """True if an entry is a weighted sum of values; otherwise, it is the value of its only token."""
        return self.rate > 1 or not self.derives_index_keys

    def num_inputs(self, head_dim: int) -> int:
        """Return the number of elements that a token contributes to entries of `head_dim` elements."""
        return (1 + self.has_logits) * head_dim * (1 + self.overlaps)

    def entry_elements(self, head_dim: int) -> int:
        """Return the number of elements per token of a cache with entries of `head_dim` elements."""
        entries_of_block = -(-self.block_size // self.rate)
        return -(-entries_of_block * head_dim // self.block_size)


class Candidates(msgspec.Struct, frozen=True):
    """The `num_blocks` blocks of `block_size` entries with the highest scores, among which layers choose entries.

    The block with the last entry is always one of them.
    """

    num_blocks: int
    block_size: int


class CompressedSpec(msgspec.Struct, frozen=True):
    """Compressed attention (DeepSeek-V4).

    Queries are products of a vector of `query_rank` elements, and have a norm without weights if `norms_queries`. All
    heads share one key, which is also the value. The last `rotary_dim` elements of queries and keys are rotated in
    pairs of neighbors, and those of the output are rotated back. Heads form `num_groups` groups. The outputs of a
    group's heads are projected to `output_rank` elements, and those of all groups to the hidden size.

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
    norms_queries: bool = True
    candidates: Candidates | None = None

    def place_entries(
        self, head_dim: int, compressions: Sequence[Compression | None], block_size: int
    ) -> list[Compression | None]:
        """Return the layers' compressions with the places of their entries in blocks of `block_size` tokens.

        A block has the same size in all caches. There are as many parts as the entries of all layers can fill, so that
        no part is much larger than a layer's keys, or half empty.
        """
        sized = [each and replace(each, block_size=block_size) for each in compressions]
        elements = [self.token_elements(head_dim, each) for each in sized]
        largest = max(keys for keys, *_ in elements)
        total = sum(sum(entries) for _, *entries in elements)
        num_parts = max(1, total // largest)
        placed: list[Compression | None] = []
        before, ends = 0, [0] * num_parts
        for each, (_, *entries) in zip(sized, elements, strict=True):
            if each is not None and each.source is not None:
                source = placed[each.source]
                assert source is not None
                own = replace(each, part=source.part, first_element=source.first_element)
                placed.append(own)
                continue
            part = min(before * num_parts // max(total, 1), num_parts - 1)
            placed.append(each and replace(each, part=part, first_element=ends[part]))
            ends[part] += sum(entries)
            before += sum(entries)
        return placed

    def block_elements(self, head_dim: int, compressions: Sequence[Compression | None]) -> int:
        """Return the number of elements per token of a block: of a layer's keys, or of a part with entries."""
        elements = [self.token_elements(head_dim, each) for each in compressions]
        ends = [
            each.first_element + entries[0]
            for each, (_, *entries) in zip(compressions, elements, strict=True)
            if each is not None
        ]
        return max([keys for keys, *_ in elements] + ends)

    def token_elements(self, head_dim: int, compression: Compression | None) -> tuple[int, ...]:
        """Return the number of elements of a token in the cache of keys, and in that of entries if there is one."""
        if compression is None:
            return (head_dim,)
        if compression.source is not None:
            return head_dim, 0
        index_dim = self.indexer.head_dim if compression.has_indexer else 0
        inputs = compression.num_inputs(head_dim)
        if not compression.derives_index_keys:
            inputs += compression.num_inputs(index_dim)
        return head_dim + inputs, compression.entry_elements(head_dim + index_dim)
