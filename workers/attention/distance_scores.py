"""Scores of distances between tokens, in attention of encoders that compares them with queries and keys.

Shapes: H heads, M queries of a tile, L keys, K head dimension, B buckets of distances, E distances.
"""

import msgspec
from torch import Tensor


class DistanceScores(msgspec.Struct, frozen=True):
    """The keys and queries of buckets of distances, which include the scale of scores.

    Each is compared with the queries or the keys of tokens; None if it is not. `buckets_E` has the buckets of the
    distances from -(E // 2) to E // 2. Distances beyond are in the first or the last one.
    """

    keys_HKB: Tensor | None
    queries_HKB: Tensor | None
    buckets_E: Tensor

    def of_keys(self, k_HLK: Tensor) -> Tensor | None:
        """Return the score of each key for each bucket, [H, L, B]; None if keys are not compared."""
        return None if self.queries_HKB is None else k_HLK @ self.queries_HKB.to(k_HLK.dtype)

    def add_to(
        self, mask_ML: Tensor, q_HMK: Tensor, of_keys_HLB: Tensor | None, distance_ML: Tensor
    ) -> Tensor:
        """Return the mask and the scores of the distances between queries and keys, [H, M, L]."""
        furthest, num_heads = len(self.buckets_E) // 2, len(q_HMK)
        places_ML = distance_ML.long().clamp(-furthest, furthest) + furthest
        bucket_ML = self.buckets_E[places_ML]
        found_HML = mask_ML.expand(num_heads, -1, -1)
        if self.keys_HKB is not None:
            of_queries_HMB = q_HMK @ self.keys_HKB.to(q_HMK.dtype)
            found_HML = found_HML + of_queries_HMB.gather(2, bucket_ML.expand(num_heads, -1, -1))
        if of_keys_HLB is not None:
            index_HLM = bucket_ML.T.expand(num_heads, -1, -1)
            found_HML = found_HML + of_keys_HLB.gather(2, index_HLM).transpose(1, 2)
        return found_HML
