"""The description of gates of norms as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormGateSpec:
    """Gates of norms: the normed hidden state x is multiplied by sigmoid(up(silu(down(x)))).

    Only the norms called `names` have a gate. Its inner size is `rank`.
    """

    names: tuple[str, ...]
    rank: int

    def applies(self, name: str) -> bool:
        """Return whether the norm has a gate, given its name with or without the layer's prefix."""
        return name.rpartition(".")[2] in self.names
