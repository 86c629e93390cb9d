"""The description of layers that compute in fewer elements than hidden states have."""

import msgspec


class BottleneckSpec(msgspec.Struct, frozen=True):
    """A bottleneck around attention and MLPs (MobileBERT, arXiv 2004.02984).

    A layer projects hidden states to `size` elements, twice: one projection is the input of queries and keys, the other
    the stream of the layer's blocks. Values are projected from the hidden states. `num_mlps` MLPs follow the attention,
    one after the other, and the stream is projected back.
    """

    size: int
    num_mlps: int
