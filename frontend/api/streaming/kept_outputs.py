"""Collect the outputs of a stream, so that the whole answer can be stored."""

from __future__ import annotations

from ...client.engine_client import Delta


class KeptOutputs:
    """Collects the outputs of the sequences of one answer. Log-probabilities are not kept."""

    def __init__(self, num_sequences: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_sequences)]
        self._token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
        self._ends: list[Delta | None] = [None] * num_sequences

    def add(self, position: int, delta: Delta) -> None:
        """Add the new output of a sequence."""
        self._texts[position].append(delta.text)
        self._token_ids[position] += delta.token_ids
        if delta.finish_reason is not None:
            self._ends[position] = delta

    def read(self) -> list[Delta] | None:
        """Return the complete outputs; None if a sequence has not ended."""
        whole: list[Delta] = []
        for texts, token_ids, end in zip(self._texts, self._token_ids, self._ends, strict=True):
            if end is None:
                return None
            text = "".join(texts)
            whole.append(Delta(text, token_ids, None, end.finish_reason, end.stop_reason))
        return whole
