"""The description of gates of norms as data."""

import msgspec


class NormGateSpec(msgspec.Struct, frozen=True):
    """Gates of norms: the normed hidden state x is multiplied by sigmoid(up(silu(down(x)))).

    Only the norms called `names` have a gate. Its inner size is `rank`.
    """

    names: tuple[str, ...]
    rank: int

    def applies(self, name: str) -> bool:
        """Return whether the norm has a gate, given its name with or without the layer's prefix."""
        return name.rpartition(".")[2] in self.names
