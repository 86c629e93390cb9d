"""Tokens to text as they arrive, and stop strings in that text.

Text is the UTF-8 decoding of the tokens' bytes, so a character appears when its last byte does, a
token costs the same however long the text is, and the pieces always add up to what
`Tokenizer.decode` makes of all tokens at once. A character that the last token leaves incomplete
never appears.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from .tokenizer import Tokenizer

_LONGEST_CUT_CHARACTER = 3  # bytes of a character that are not yet the whole of it


class IncrementalDetokenizer:
    """The text of one sequence of a request.

    A stop string counts from the token after the first `min_tokens` on, that is, when its last
    character does. Where several match, the one that ends first counts, then the longest.

    `stop_reason`: the stop string that ended the text, if one has.
    `num_tokens`: how many tokens have been consumed; with a stop string, up to the one ending it.
    """

    __slots__ = (
        "_bytes_of",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "_strips",
        "_tail",
        "_texts",
        "_unstoppable",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._bytes_of = tokenizer.bytes_of(skip_special_tokens).__getitem__
        self._texts = tokenizer.text_of(skip_special_tokens)
        self._stops = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        # A text that starts a sequence loses the space that encoding put there; one that goes on
        # from a prompt does not.
        self._strips = tokenizer.strips_leading_space and not any(
            map(self._bytes_of, prompt_token_ids)
        )
        self._tail = self._cut_character(prompt_token_ids)
        self._held = ""
        self._unstoppable = 0  # leading characters of _held in which no stop string may end
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """The text that `token_ids` add, less what may yet turn out to be part of a character or
        of a stop string; with `finished`, nothing is held for a stop string. "" once one has matched."""
        if self.stop_reason is not None:
            return ""
        if self._stops:
            return self._append_until_stop(token_ids, finished)
        self.num_tokens += len(token_ids)
        return self._decode(token_ids)

    def append_one(self, token_id: int) -> str:
        """What `append` does, sooner where the token is a text of its own, as most are."""
        text = None
        if not (self._stops or self._tail or self._strips):
            text = self._texts[token_id]
        if text is None:
            return self.append((token_id,))
        self.num_tokens += 1
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._tail and not self._strips:
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        data = self._tail + b"".join(map(self._bytes_of, token_ids))
        text, consumed = utf_8_decode(data, "replace", False)
        self._tail = data[consumed:]
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(" ")
        return text

    def _append_until_stop(self, token_ids: Sequence[int], finished: bool) -> str:
        protected = self._min_tokens - self.num_tokens
        if 0 < protected < len(token_ids):
            text = self._append_until_stop(token_ids[:protected], False)
            return text + self._append_until_stop(token_ids[protected:], finished)

        tail, strips = self._tail, self._strips
        text = self._held + self._decode(token_ids)
        if protected > 0:
            self._unstoppable = len(text)
        match = self._find_stop(text)
        if match is not None:
            end, start, self.stop_reason = match
            self._tail, self._strips = tail, strips
            self._consume_until(token_ids, end - len(self._held))
            self._held = ""
            return text[: end if self._include_stop else start]

        self.num_tokens += len(token_ids)
        cut = len(text) if finished else self._start_of_possible_stop(text)
        self._held = text[cut:]
        self._unstoppable = max(0, self._unstoppable - cut)
        return text[:cut]

    def _find_stop(self, text: str) -> tuple[int, int, str] | None:
        """End, start and text of the first stop string in `text`."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, self._unstoppable - len(stop) + 1))) >= 0
        ]
        return min(matches, default=None)

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string starts; else its length."""
        best = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), best)
            while start >= 0:
                if stop.startswith(text[start:]):
                    best = start
                    break
                start = text.find(stop[0], start + 1, best)
        return best

    def _consume_until(self, token_ids: Sequence[int], num_chars: int) -> None:
        """Count the first of `token_ids` that together have `num_chars` characters."""
        for token_id in token_ids:
            self.num_tokens += 1
            num_chars -= len(self._decode((token_id,)))
            if num_chars <= 0:
                break

    def _cut_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The bytes of a character that the prompt ends in the middle of."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            if len(data) >= _LONGEST_CUT_CHARACTER:
                break
            data = self._bytes_of(token_id) + data
        return data[utf_8_decode(data, "replace", False)[1] :]
