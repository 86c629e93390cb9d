"""The description of many small experts, which pairs of keys choose, as data."""

import math

import msgspec


class PairExpertsSpec(msgspec.Struct, frozen=True):
    """Experts with one intermediate element each, which are added to a layer's MLP (Doge, arXiv 2412.11834).

    A router has two sets of keys. The logit of expert i * K + j is the sum of those of key i of the first set and of
    key j of the second one, with K keys in a set (product keys, arXiv 1907.05242).
    """

    num_experts: int
    num_experts_per_token: int

    @property
    def num_keys(self) -> int:
        """The number of keys in a set, K."""
        return math.isqrt(self.num_experts)
