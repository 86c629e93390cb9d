"""Shows the progress of prompts in streams, as llama.cpp does for `return_progress`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...client.engine_client import Sequence
from ..logprobs import Json
from .event_stream import ChunkEncoder, StreamFormat


class ProgressChunks(ChunkEncoder):
    """Writes events with the progress of prompts, before the chunks of another encoder.

    The first event of a prompt shows its cached tokens. One more follows each part that was computed.

    `make_event` returns the event of a sequence with its `prompt_progress`.
    """

    def __init__(self, chunks: ChunkEncoder, make_event: Callable[[Sequence, Json], bytes]) -> None:
        self._chunks = chunks
        self._make_event = make_event
        self._num_shown: dict[int, int] = {}

    @property
    def format(self) -> StreamFormat:
        """The format of the stream around the chunks."""
        return self._chunks.format

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new progress and the new output of a sequence."""
        progress = self._progress(sequence) if sequence.scheduled_time else b""
        has_output = sequence.num_read_tokens < len(sequence.token_ids)
        if has_output or sequence.finish_reason is not None:
            return progress + self._chunks.encode(sequence)
        sequence.has_updates = False
        return progress

    def _progress(self, sequence: Sequence) -> bytes:
        total, end = sequence.num_prompt_tokens, sequence.first_token_time
        # A request that was preempted or has lost its core may compute its output again.
        processed = total if end else min(sequence.num_computed_tokens, total)
        shown = self._num_shown.get(sequence.position)
        if shown is not None and processed <= shown:
            return b""
        self._num_shown[sequence.position] = processed
        cached = sequence.num_cached_tokens
        seconds = max((end or time.monotonic()) - sequence.scheduled_time, 0.0)
        reports = {cached: 0.0} if shown is None else {}
        if processed > cached:
            reports[processed] = seconds
        return b"".join(
            self._make_event(
                sequence,
                {
                    "total": total,
                    "cache": cached,
                    "processed": count,
                    "time_ms": round(passed * 1e3),
                },
            )
            for count, passed in reports.items()
        )

    def closing(self) -> bytes:
        """Return the chunks between the last output and the end of the stream."""
        return self._chunks.closing()
