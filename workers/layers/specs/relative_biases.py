"""The description of biases by distance as data."""

import msgspec


class RelativeBiasSpec(msgspec.Struct, frozen=True):
    """Biases of attention scores that depend on the query and on the distance to the key (Inkling).

    Each query head projects the hidden state to `rank` elements. Their products with a stored matrix are the biases of
    the keys at the distances 0 to `max_distance` - 1; in a layer with a window, to the last key in it. They are scaled
    like queries. If `bound` is not 0, a head's elements are multiplied by stored factors, and then divided by a number
    that limits their norm to `bound` (Inkling 2).
    """

    rank: int
    max_distance: int
    bound: float = 0.0


class PredictedStreamSpec(msgspec.Struct, frozen=True):
    """A second hidden state of each token, which predicts the next one (ProphetNet, arXiv 2001.04063).

    Both have heads of `head_dim` elements, and share keys and values, so that the model has twice as many query heads
    as key/value heads. A head projects a state to a bias for each of `num_buckets` ranges of distances to the key.
    Distances from `max_distance` on are in the last one. In training, there were states for the next `num_predicted`
    tokens, but only that of the next one is computed.
    """

    head_dim: int
    num_buckets: int
    max_distance: int
    num_predicted: int
    num_streams: int = 2
