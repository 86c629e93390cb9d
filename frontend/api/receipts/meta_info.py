"""The facts about an answer that SGLang's clients read: `meta_info` of a choice, and `sglext` of an answer."""

from __future__ import annotations

from collections.abc import Iterable

from ...client.engine_client import Delta, PositionLogprobs, Sequence
from ...http.json_pieces import EncodedJSON, encode_list
from ..generation import matched_stop
from ..logprobs import Json, LogprobsRenderer, finite

Entry = tuple[float | None, int, str | None]
"""The log-probability and the ID of a token, and its text if the request asks for that."""


def meta_info(
    answer_id: str,
    sequence: Sequence,
    newest: Delta,
    num_tokens: int,
    weight_version: str,
    *,
    only_prompt: bool = False,
) -> Json:
    """Return the `meta_info` of a sequence, without log-probabilities.

    Args:
        answer_id: The ID of the answer.
        sequence: The sequence.
        newest: Its newest output.
        num_tokens: The number of generated tokens that the answer shows.
        weight_version: The name of the weights that generated the newest ones.
        only_prompt: True if the answer shows no generated tokens.
    """
    meta: Json = {
        "id": answer_id,
        "finish_reason": _finish_reason(newest, num_tokens, only_prompt=only_prompt),
        "prompt_tokens": sequence.num_prompt_tokens,
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.num_cached_tokens,
        "weight_version": weight_version,
    }
    if newest.finish_reason is not None:
        meta["e2e_latency"] = max(sequence.finish_time - sequence.arrival_time, 0.0)
    return meta


def _finish_reason(newest: Delta, num_tokens: int, *, only_prompt: bool) -> Json | None:
    if newest.finish_reason is None:
        return None
    if newest.finish_reason == "length" or only_prompt:
        return {"type": "length", "length": num_tokens}
    if newest.finish_reason == "abort":
        return {"type": "abort", "message": newest.error}
    return {"type": newest.finish_reason, "matched": matched_stop(newest)}


class TokenEntries:
    """Writes the lists of log-probabilities in `meta_info`.

    Args:
        renderer: Writes the texts of tokens.
        shows_text: True if entries have texts.
    """

    def __init__(self, renderer: LogprobsRenderer, *, shows_text: bool) -> None:
        self._renderer = renderer
        self._shows_text = shows_text

    def chosen(self, tokens: Iterable[tuple[int, PositionLogprobs | None]]) -> EncodedJSON:
        """Return an entry for each token. Its log-probability is null where none was computed."""
        entries = (
            self._entry(token, None if position is None else position.logprob)
            for token, position in tokens
        )
        return encode_list(entries, at_once=1)

    def others(self, positions: Iterable[PositionLogprobs | None], part: slice) -> EncodedJSON:
        """Return a list of the other tokens at each position; null for a position without log-probabilities."""
        lists = (
            None
            if position is None
            else [self._entry(token, logprob) for token, logprob in position.top[part]]
            for position in positions
        )
        return encode_list(lists, at_once=1)

    def _entry(self, token_id: int, logprob: float | None) -> Entry:
        text = self._renderer.token(token_id) if self._shows_text else None
        return None if logprob is None else finite(logprob), token_id, text


def choice_meta_info(
    answer_id: str,
    sequence: Sequence,
    output: Delta,
    renderer: LogprobsRenderer,
    weight_version: str,
) -> Json:
    """Return the `meta_info` of a complete choice of a chat."""
    meta = meta_info(answer_id, sequence, output, sequence.num_read_tokens, weight_version)
    if (positions := output.logprobs) is None:
        return meta
    entries = TokenEntries(renderer, shows_text=False)
    meta["output_token_logprobs"] = entries.chosen(zip(output.token_ids, positions, strict=True))
    if sequence.params.logprobs:
        meta["output_top_logprobs"] = entries.others(positions, slice(None))
    return meta


def cached_tokens_details(sequence: Sequence) -> Json:
    """Return where the cached tokens of a prompt were: in memory, or in the storage of a KV connector.

    Blocks in the memory of the host count as those of the device, because the scheduler counts them together.
    """
    stored = min(sequence.num_loaded_tokens, sequence.num_cached_tokens)
    details = {"device": sequence.num_cached_tokens - stored, "host": 0}
    return details | ({"storage": stored} if stored else {})
