"""The description of attention residuals as data."""

import msgspec


class AttentionResidualsSpec(msgspec.Struct, frozen=True):
    """Attention residuals (Kimi K3, arXiv 2607.24653): a token attends to sums of earlier outputs.

    The layers form groups of `group_size`. A token has `num_streams` hidden states: first its embedding, then for each
    group the sum of its blocks' outputs. A block reads a mean of the embedding and of the sums up to its own group,
    before its output is added to the sum of the group. The first block of a group reads no sum of that group, and the
    final norm reads one more such mean.

    The factors of a mean are a softmax of the products of a stored query with each hidden state, divided by its root
    mean square, to whose square `eps` is added. The query is the product of a projection and the weights of a norm.

    If `norms_values` (Inkling 2), the mean is of the normed hidden states, the query is stored as it is, and the
    products are divided by the square root of the hidden size. The attention of the first layer reads the embedding.
    """

    num_streams: int
    group_size: int
    eps: float
    norms_values: bool = False

    @classmethod
    def for_layers(
        cls, num_layers: int, group_size: int, eps: float, *, norms_values: bool = False
    ) -> "AttentionResidualsSpec":
        """Return the description for a model with this number of layers."""
        return cls(1 + -(-num_layers // group_size), group_size, eps, norms_values)

    def num_read(self, layer: int, *, is_mlp: bool) -> int:
        """Return the number of hidden states that the attention of a layer reads, or its MLP."""
        return 1 + (layer // self.group_size + 1 if is_mlp else -(-layer // self.group_size))

    def stream_of(self, layer: int) -> int:
        """Return the index of the hidden state to which the outputs of a layer are added."""
        return 1 + layer // self.group_size

    def begins(self, layer: int) -> bool:
        """Return whether a layer is the first of its group, so that its first output begins the sum."""
        return layer % self.group_size == 0
