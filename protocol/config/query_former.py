"""The Q-Former, which turns rows of features into a fixed number of outputs."""

import msgspec


class QueryFormerSpec(msgspec.Struct, frozen=True):
    """Layers in which learned queries attend to each other and to rows of features (BLIP-2, arXiv 2301.12597).

    Attributes:
        size: The number of elements of a query.
        cross_attention_every: The queries attend to the rows in every layer whose index is a multiple of this.
        read_size: The number of elements of a row.
    """

    size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    cross_attention_every: int
    read_size: int
    activation: str
    norm_eps: float
