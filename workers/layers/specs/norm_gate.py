"""The description of gates of norms as data."""

import msgspec


class NormGateSpec(msgspec.Struct, frozen=True):
    """Gates of norms: the normed hidden state x is multiplied by factor * sigmoid(up(silu(down(x)))).

    Only the norms called `names` have a gate. Its inner size is `rank`. If it `has_latent_gates`, the norms of the
    vectors of latent attention have gates as well, and the same offset of weights (GigaChat 3.5).
    """

    names: tuple[str, ...]
    rank: int
    factor: float = 1.0
    has_latent_gates: bool = False

    def applies(self, name: str) -> bool:
        """Return whether the norm has a gate, given its name with or without the layer's prefix."""
        return name.rpartition(".")[2] in self.names
