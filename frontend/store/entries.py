"""Make the entries with which a frontend records sequences."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby

from ...protocol.arrays import int32_view
from ...protocol.messages import FinishedRequest, FinishReason
from ...protocol.store.requests import LogTokens, StreamEnd
from ..client.engine_client import RequestGroup, Sequence


def merge_entries(entries: Iterable[LogTokens]) -> Iterator[LogTokens]:
    """Yield entries in which consecutive steps of the same streams are one step with several tokens of each."""
    for (streams, is_plain), group in groupby(
        entries, lambda entry: (entry.streams, _is_plain(entry))
    ):
        steps = list(group)
        if not is_plain or len(steps) == 1:
            yield from steps
            continue
        rows = int32_view(b"".join(step.token_ids for step in steps)).reshape(len(steps), -1)
        counts = array("i", [len(steps)]) * (len(streams) // 4)
        yield LogTokens(steps[-1].number, streams, rows.T.tobytes(), counts.tobytes())


def _is_plain(entry: LogTokens) -> bool:
    """Return whether an entry has nothing but one token of each stream."""
    return len(entry.token_ids) == len(entry.streams) and not (
        entry.num_tokens or entry.finished or entry.logprobs or entry.prompt_logprobs
    )


def numbers_of(group: RequestGroup) -> bytes:
    """Return the request indices of a group's sequences, int32[N]."""
    return array("i", (sequence.request_index for sequence in group.sequences)).tobytes()


def finish_of(sequence: Sequence) -> FinishedRequest:
    """Return the end of a sequence as its core reported it."""
    assert sequence.finish_reason is not None
    stop = sequence.stop_reason if isinstance(sequence.stop_reason, int) else None
    return FinishedRequest(
        sequence.request_index, sequence.finish_reason, stop, sequence.error or ""
    )


def end_of(sequence: Sequence) -> StreamEnd:
    """Return the end of a sequence as its client receives it."""
    assert sequence.finish_reason is not None
    return StreamEnd(
        sequence.num_generated_tokens,
        int(FinishReason(sequence.finish_reason)),
        sequence.stop_reason,
        sequence.error,
        sequence.retry_after_s,
        sequence.num_cached_tokens,
        sequence.num_accepted_predictions,
        sequence.num_rejected_predictions,
    )
