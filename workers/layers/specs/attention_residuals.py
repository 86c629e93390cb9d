"""The description of attention residuals as data."""

import msgspec


class PassesSpec(msgspec.Struct, frozen=True):
    """Several passes through the layers of some groups (Inkling-2-Mini).

    The `num_layers` layers from `first` on are computed `count` times, each time with keys and values of their own. In
    later passes, the inputs of queries, keys, values and the MLP are combined with messages: means, with other queries,
    of the sums of these groups in the pass before. The input x and the message m become (1 - tanh(f)) x + tanh(g) m,
    where f and g are products of a product of the normed x and m, which has `rank` outputs.
    """

    first: int
    num_layers: int
    count: int
    rank: int

    def depth(self, layer: int) -> int:
        """Return the index that a computed layer has if the layers of all passes are counted once."""
        skipped = min(max(layer - self.first, 0) // self.num_layers, self.count - 1)
        return layer - skipped * self.num_layers


class AttentionResidualsSpec(msgspec.Struct, frozen=True):
    """Attention residuals (Kimi K3, arXiv 2607.24653): a token attends to sums of earlier outputs.

    The layers form groups of `group_size`. A token has several hidden states: first its embedding, then for each of
    `num_sums` groups the sum of its blocks' outputs. A block reads a mean of the embedding and of the sums up to its
    own group, before its output is added to the sum of the group. The first block of a group reads no sum of that
    group, and the final norm reads one more such mean.

    The factors of a mean are a softmax of the products of a stored query with each hidden state, divided by its root
    mean square, to whose square `eps` is added. The query is the product of a projection and the weights of a norm.

    If `norms_values` (Inkling 2), the mean is of the normed hidden states, the query is stored as it is, and the
    products are divided by the square root of the hidden size. The attention of the first layer reads the embedding.

    If there are several `passes`, the last hidden states are copies of the sums that messages are computed from.
    """

    num_sums: int
    group_size: int
    eps: float
    norms_values: bool = False
    passes: PassesSpec | None = None

    @classmethod
    def for_layers(
        cls, num_layers: int, group_size: int, eps: float, *, norms_values: bool = False
    ) -> "AttentionResidualsSpec":
        """Return the description for a model with this number of layers."""
        return cls(-(-num_layers // group_size), group_size, eps, norms_values)

    @property
    def num_streams(self) -> int:
        """The number of hidden states of a token."""
        return 1 + self.num_sums + len(self.repeated_sums)

    @property
    def repeated_sums(self) -> range:
        """The indices of the hidden states that are sums of groups that are computed several times."""
        if self.passes is None:
            return range(0)
        first, size = 1 + self.passes.first // self.group_size, self.passes.num_layers
        return range(first, first + size // self.group_size)

    def depth(self, layer: int) -> int:
        """Return the index that a computed layer has if the layers of all passes are counted once."""
        return layer if self.passes is None else self.passes.depth(layer)

    def looped_index(self, layer: int) -> int | None:
        """Return the index of a layer among those that are computed several times; None if it is not one of them."""
        if self.passes is None:
            return None
        index = self.depth(layer) - self.passes.first
        return index if 0 <= index < self.passes.num_layers else None

    def num_read(self, layer: int, *, is_mlp: bool) -> int:
        """Return the number of hidden states that the attention of a layer reads, or its MLP."""
        depth = self.depth(layer)
        return 1 + (depth // self.group_size + 1 if is_mlp else -(-depth // self.group_size))

    def stream_of(self, layer: int) -> int:
        """Return the index of the hidden state to which the outputs of a layer are added."""
        return 1 + self.depth(layer) // self.group_size

    def stream_before(self, layer: int) -> int:
        """Return the index of the hidden state to which the layer before this one adds; 0 for the first layer."""
        return self.stream_of(layer - 1) if layer else 0

    def begins(self, layer: int) -> bool:
        """Return whether a layer is the first of its group, so that its first output begins the sum."""
        return self.depth(layer) % self.group_size == 0
