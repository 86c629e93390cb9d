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
