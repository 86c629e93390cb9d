"""Send the inputs of a large request a few at a time, so that they delay those of other clients little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ....protocol.config import EngineConfig
from ..request_group import RequestGroup, Sequence

STEPS_AT_ONCE: Final = 3
"""Number of steps that the inputs of a request fill at most: two that are in flight, and one that waits."""


class SendWindow:
    """Sends the sequences of groups to their cores.

    Cores serve sequences first come, first served. A request for pooling may have thousands of them, and each takes one
    step. So its first ones are sent, and whenever one of them ends, the next one is.
    """

    def __init__(self, config: EngineConfig, send: Callable[[Sequence], None]) -> None:
        self._send = send
        num_steps = STEPS_AT_ONCE * config.parallel.data_parallel_size
        self._max_sequences = num_steps * config.scheduler.max_num_seqs
        self._max_tokens = num_steps * config.scheduler.max_num_batched_tokens
        self._unsent: dict[RequestGroup, dict[Sequence, None]] = {}
        """For each group, the sequences that were not sent yet, from the last to the first."""

    def send_group(self, group: RequestGroup) -> None:
        """Send the unfinished sequences of a group; of a request for pooling only the first ones."""
        sequences = [sequence for sequence in group.sequences if not sequence.finished]
        limit = len(sequences)
        if sequences and sequences[0].request.pooling_params is not None:
            num_tokens = sum(sequence.num_prompt_tokens for sequence in sequences)
            limit = min(self._max_sequences, 1 + self._max_tokens * limit // max(num_tokens, 1))
        for sequence in sequences[:limit]:
            self._send(sequence)
        if limit < len(sequences):
            self._unsent[group] = dict.fromkeys(reversed(sequences[limit:]))

    def record_end(self, sequence: Sequence) -> None:
        """Send the next sequence of a group, because one of its sequences has ended."""
        unsent = self._unsent.get(sequence.group)
        if unsent and sequence not in unsent:
            self._send(unsent.popitem()[0])
        self.remove_sequence(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Do not send a sequence that has ended or was sent in another way."""
        unsent = self._unsent.get(sequence.group)
        if unsent is not None:
            unsent.pop(sequence, None)
            if not unsent:
                del self._unsent[sequence.group]

    def drop_group(self, group: RequestGroup) -> None:
        """Send no more sequences of a group, because all of them are about to end."""
        self._unsent.pop(group, None)
