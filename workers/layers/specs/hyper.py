"""The description of hyper-connections as data."""

import msgspec


class HyperConnectionsSpec(msgspec.Struct, frozen=True):
    """Hyper-connections (arXiv 2409.19606): a token has `num_streams` hidden states, at first its embedding.

    A block reads the sum of the streams times one factor each, and its output times another factor is added to each
    stream. Factors are sigmoids, computed from all streams of the token, plus `eps`; those of outputs are multiplied by
    `output_scale` before that. The final norm reads one more such sum.

    If `num_iterations` is not 0, factors of outputs have no `eps`, and each stream is first replaced by a sum of all
    streams (arXiv 2512.24880). The factors of these sums are a softmax of the streams' logits, plus `eps`. They are
    then divided by the sums of their columns and of their rows, in turn, `num_iterations` times. Each divisor is
    increased by `eps`, and the last ones are sums of columns.

    If `averages_last`, the final norm reads the mean of the streams instead.

    If factors are `delayed` (DeepSeek-V4.1), a block reads the sum with the factors that were computed for the block
    before it. The first block reads the first stream, and the final norm the sum with the factors of the last block.

    If `rank` is not 0 (Qwen4), a block instead reads the mean of the normed streams, each element times a factor. The
    factors are sigmoids of two products, of which the first one has `rank` outputs. Factors of outputs have no `eps`.
    """

    num_streams: int
    output_scale: float = 2.0
    eps: float = 1e-6
    num_iterations: int = 0
    averages_last: bool = False
    rank: int = 0
    delayed: bool = False
