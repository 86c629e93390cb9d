"""The Q-Former, which turns rows of features into a fixed number of outputs."""

import msgspec


class QueryFormerSpec(msgspec.Struct, frozen=True):
    """Layers in which learned queries attend to each other and to rows of features (BLIP-2, arXiv 2301.12597).

    Attributes:
        size: The number of elements of a query.
        cross_attention_every: The queries attend to the rows in every layer whose index is a multiple of this.
        read_size: The number of elements of a row.
        max_text_tokens: If not 0, the queries also attend to a text of at most this many tokens, which does not attend
            to the rows (InstructBLIP, arXiv 2305.06500).
        vocab_size: The number of tokens that such a text may have.
    """

    size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    cross_attention_every: int
    read_size: int
    activation: str
    norm_eps: float
    max_text_tokens: int = 0
    vocab_size: int = 0
