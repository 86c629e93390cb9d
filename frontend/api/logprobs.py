"""Convert log-probabilities to the three formats of the API: for chats, completions and prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

import msgspec

from ..client.logprobs import PositionLogprobs
from ..http.json_pieces import EncodedJSON, encode_list, encode_object
from ..tokenizer.tokenizer import Tokenizer

Json: TypeAlias = dict[str, Any]

FEW: Final = 20
"""Number of candidates up to which they are encoded together with their position; OpenAI allows no more."""


def finite(logprob: float) -> float:
    """Return the logprob, or -9999 for minus infinity, which JSON cannot represent."""
    return logprob if math.isfinite(logprob) else -9999.0


class LogprobsRenderer:
    """Renders tokens as text, or as `token_id:N` (`return_tokens_as_token_ids`)."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def token(self, token_id: int) -> str:
        """Return the text of a token, or `token_id:N` if the request asks for ids."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def chat(self, positions: Iterable[PositionLogprobs], *, lists_chosen: bool = False) -> Json:
        """Return the `logprobs` of a chat choice.

        `bytes` are the token's own bytes, which may be a part of a character. If `lists_chosen`, the candidates begin
        with the generated token unless it is one of them.
        """
        if lists_chosen:
            positions = map(_with_chosen, positions)
        return {"content": encode_list(map(self._chat_position, positions), at_once=1)}

    def chat_entries(self, positions: Iterable[PositionLogprobs]) -> list[Json]:
        """Return the entries of `chat` as mutable objects."""
        return [
            self.chat_token(position.token_id, position.logprob)
            | {"top_logprobs": [self.chat_token(*candidate) for candidate in position.top]}
            for position in positions
        ]

    def _chat_position(self, position: PositionLogprobs) -> Json:
        chosen = self.chat_token(position.token_id, position.logprob)
        top = (self.chat_token(*candidate) for candidate in position.top)
        chosen["top_logprobs"] = list(top) if len(position.top) <= FEW else encode_list(top)
        return chosen

    def chat_token(self, token_id: int, logprob: float) -> Json:
        """Return the text, the log-probability and the bytes of a token."""
        data = self._tokenizer.token_bytes(token_id)
        token = self.token(token_id) if self._as_token_ids else data.decode(errors="replace")
        return {"token": token, "logprob": finite(logprob), "bytes": list(data)}

    def prompt(self, positions: Iterable[PositionLogprobs | None]) -> EncodedJSON:
        """Return `prompt_logprobs`: the candidates for each prompt token by token id, and null for the first."""
        return encode_list(map(self._prompt_position, positions), at_once=1)

    def _prompt_position(self, position: PositionLogprobs | None) -> EncodedJSON | None:
        if position is None:
            return None
        ranked = [(token, logprob, i) for i, (token, logprob) in enumerate(position.top, 1)]
        candidates = [(position.token_id, position.logprob, position.rank), *ranked]
        # If the prompt's token is also a candidate, it appears once, with its rank among the candidates.
        ranks = {token: (logprob, rank) for token, logprob, rank in candidates}
        return encode_object(
            (
                str(token),
                {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token(token)},
            )
            for token, (logprob, rank) in ranks.items()
        )


def _with_chosen(position: PositionLogprobs) -> PositionLogprobs:
    if any(token_id == position.token_id for token_id, _ in position.top):
        return position
    chosen = (position.token_id, position.logprob)
    return msgspec.structs.replace(position, top=[chosen, *position.top])


class CompletionLogprobs:
    """Renders the `logprobs` of one completion choice, piece by piece.

    `text_offset` continues across pieces. An offset counts the characters that start in earlier tokens, so tokens that
    share a character share an offset.
    """

    def __init__(
        self, renderer: LogprobsRenderer, tokenizer: Tokenizer, skip_special: bool
    ) -> None:
        self._renderer = renderer
        self._bytes = tokenizer.bytes_by_id(skip_special_tokens=False)
        self._visible_bytes = tokenizer.bytes_by_id(skip_special)
        self._offset = 0

    def piece(
        self,
        token_ids: list[int],
        positions: Iterable[PositionLogprobs | None],
        *,
        prompt_token_ids: Sequence[int] = (),
        prompt_text: str = "",
    ) -> Json:
        """Return the `logprobs` of the next tokens.

        With an echoed prompt, `positions` starts with the prompt's tokens.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[EncodedJSON | None] = []
        offsets = self._prompt_offsets(prompt_token_ids, prompt_text) + self._offsets(token_ids)
        all_token_ids = [*prompt_token_ids, *token_ids]
        for token_id, position in zip(all_token_ids, positions, strict=True):
            token = self._token(token_id)
            tokens.append(token)
            if position is None:
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(finite(position.logprob))
            top: dict[str, float] = {}
            # The token itself is the first, as in vLLM.
            for candidate, logprob in ((token_id, position.logprob), *position.top):
                name = self._token(candidate)
                # If several tokens have the same text, keep the most probable.
                top[name] = max(finite(logprob), top.get(name, -math.inf))
            tops.append(encode_object(top.items()))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": encode_list(tops, at_once=1),
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        r"""Return a token's text, or `bytes:\xf0\x9f` like OpenAI if the token is an incomplete character."""
        token = self._renderer.token(token_id)
        data = self._bytes[token_id]
        if "\ufffd" not in token or token.encode() == data:
            return token
        return "bytes:" + repr(data)[2:-1]

    def _prompt_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the text offsets of prompt tokens, including special tokens.

        Encoding may add a space or a BOS token, which is not in the text. These come first and have offset 0.
        """
        lengths = [_num_characters(self._bytes[token_id]) for token_id in token_ids]
        added = max(0, sum(lengths) - len(text))
        self._offset += len(text)
        ends = accumulate(lengths)
        return [max(0, end - length - added) for end, length in zip(ends, lengths, strict=True)]

    def _offsets(self, token_ids: list[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += _num_characters(self._visible_bytes[token_id])
        return offsets


def _num_characters(data: bytes) -> int:
    """Return the number of UTF-8 characters that start in `data`."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
