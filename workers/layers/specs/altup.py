"""The description of alternating updates and of inputs of single layers as data (Gemma 3n and 4)."""

import msgspec


class PerLayerInputsSpec(msgspec.Struct, frozen=True):
    """A vector of `size` elements for each token and layer. Every layer adds a gated part of it to its output.

    It is the sum of a row of a table with `vocab_size` rows and a product of the token's embedding; only the product if
    that is 0 (EmbeddingGemma 2). Tokens beyond the table use its first row. Where encoder outputs replace embeddings,
    the row is that of `placed_token_id` if there is one.
    """

    size: int
    vocab_size: int
    placed_token_id: int | None = None


class AltUpSpec(msgspec.Struct, frozen=True):
    """Alternating updates (arXiv 2301.13310): a token has `num_streams` hidden states.

    A layer predicts all of them, computes only the `active` one, and corrects all by its prediction error. If
    `scales_output`, the input of the per-layer block is multiplied by a stored vector. In addition to its attention, a
    layer has a product of rank `laurel_rank` (LAuReL, arXiv 2411.07501).
    """

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int
