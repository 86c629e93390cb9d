"""The specification of layers and transformer blocks whose weights several layers share."""

import msgspec


class SharedBlock(msgspec.Struct, frozen=True):
    """A layer's use of a transformer block whose weights several layers share (Zamba, arXiv 2405.16712).

    The block's attention reads the norm of the hidden state and the token's embedding, one after the other. Its MLP
    reads the norm of the attention's output. The layer's own projection of the MLP's output is added to the input of
    the layer's recurrent part, but not to the residual stream.

    The layer `source` stores the weights. If `rank` is not 0, the layer's own products of this rank, stored there by
    `number`, are added to the MLP's first product, and to queries, keys and values if `adapts_attention` (Zamba2, arXiv
    2411.15242).
    """

    source: int
    number: int
    rank: int
    adapts_attention: bool


class Restart(msgspec.Struct, frozen=True):
    """A change of the hidden state before a layer, with which a pass through some layers begins.

    If `norms`, the hidden state is divided by its root mean square, and multiplied by the weights of the final norm
    if `has_norm_weights`. Then it is kept as state number `keeps`. Last, the kept state number `adds`, or the
    stored vector if `adds_initial`, is added to it. If `share` is not 0, the sum is a mean, in which that is the weight
    of the kept state.

    If `copies_sums`, the sums that messages are computed from are copied; see `PassesSpec`.
    """

    norms: bool = True
    has_norm_weights: bool = False
    keeps: int | None = None
    adds: int | None = None
    share: float = 0.0
    adds_initial: bool = False
    copies_sums: bool = False
