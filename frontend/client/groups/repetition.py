"""Find a pattern of tokens that an output repeats without end."""

from __future__ import annotations

from array import array
from typing import Final

from ....protocol.sampling_params import SamplingParams

REPETITION: Final = "repetition_detected"
"""The stop reason of a sequence that repeated itself."""


class RepetitionSearch:
    """Searches the tokens of one sequence, as they arrive, for the repetitions of `RepetitionDetectionParams`.

    A repetition counts when its last token is not among the first `min_tokens` tokens of the output.
    """

    __slots__ = ("_max_size", "_min_count", "_min_size", "_num_searched")

    def __init__(self, min_size: int, max_size: int, min_count: int, min_tokens: int) -> None:
        self._min_size, self._max_size, self._min_count = min_size, max_size, min_count
        # No shorter output can contain a repetition.
        self._num_searched = max(min_size * min_count, min_tokens) - 1

    @classmethod
    def from_params(cls, params: SamplingParams) -> RepetitionSearch | None:
        """Return the search that these parameters request; None if they request none."""
        wanted = params.repetition_detection
        if wanted is None or not wanted.max_pattern_size:
            return None
        min_size = max(1, wanted.min_pattern_size)
        return cls(min_size, wanted.max_pattern_size, wanted.min_count, params.min_tokens)

    def cut(self, token_ids: array[int], *, has_ended: bool) -> bool:
        """Return True if the tokens contain a repetition, and drop all tokens after the first one.

        If the output `has_ended`, a repetition that its last token completes does not count.
        """
        for end in range(self._num_searched + 1, len(token_ids) + (not has_ended)):
            self._num_searched = end
            if self._repeats(token_ids, end):
                del token_ids[end:]
                return True
        return False

    def _repeats(self, token_ids: array[int], end: int) -> bool:
        """Return True if the first `end` tokens end with a repetition."""
        last = end - 1
        for size in range(self._min_size, min(self._max_size, end // self._min_count) + 1):
            # Most sizes are ruled out by one token, without copies.
            if token_ids[last] == token_ids[last - size]:
                start = end - size * self._min_count
                if token_ids[start : end - size] == token_ids[start + size : end]:
                    return True
        return False
