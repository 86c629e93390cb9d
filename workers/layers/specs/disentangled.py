"""The description of disentangled attention as data."""

from typing import Literal

import msgspec


class DisentangledSpec(msgspec.Struct, frozen=True):
    """Attention whose scores also compare tokens with distances (DeBERTa, arXiv 2006.03654).

    Distances from -`max_distance` to `max_distance` fall into 2 * `span` buckets, each of which has an embedding. The
    projections of an embedding give a key, which is compared with the token's query if `compares_queries`, and a query,
    which is compared with the key's token if `compares_keys`. These projections are those of the hidden states if they
    are shared. If `has_log_buckets`, only distances below half of the span have a bucket each.
    """

    span: int
    max_distance: int
    has_log_buckets: bool
    compares_queries: bool
    compares_keys: bool
    shares_projections: bool
    norms_embeddings: bool


class InputConvolution(msgspec.Struct, frozen=True):
    """A convolution of a layer's input over an odd number of tokens, which is added to the layer's output."""

    num_taps: int
    activation: Literal["gelu", "relu", "tanh"]
