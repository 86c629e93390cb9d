"""Detokenize incrementally, and find stop strings in the text.

The text is the UTF-8 decoding of the tokens' bytes. A character is returned with its last byte, and the cost per token
does not grow with the text. The concatenated pieces equal `Tokenizer.decode` of all tokens, except that an incomplete
last character is never returned.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from .stop_patterns import StopPatterns
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

_LONGEST_CUT_CHARACTER = 3  # Maximum bytes of an incomplete UTF-8 character.


class IncrementalDetokenizer:
    """Detokenizes one sequence.

    A stop string counts when its last character comes after the first `min_tokens` tokens. If several match, the one
    that ends first wins, then the longest. The match of an expression stays in the text.

    Attributes:
        stop_reason: The stop string or expression that ended the text, if any.
        num_tokens: The number of consumed tokens; after a stop string, up to the token that completed it.
    """

    __slots__ = (
        "_bytes_of",
        "_held",
        "_include_stop",
        "_json",
        "_min_tokens",
        "_stop_strings",
        "_strips",
        "_tail",
        "_texts",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._bytes_of = tokenizer.bytes_by_id(skip_special_tokens).__getitem__
        self._texts = tokenizer.text_by_id(skip_special_tokens)
        self._json = tokenizer.json_by_id(skip_special_tokens)
        self._stop_strings: StopStrings | StopPatterns | None = None
        if stop_regex:
            self._stop_strings = StopPatterns(tuple(stop), tuple(stop_regex))
        elif stop:
            self._stop_strings = StopStrings(tuple(stop))
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        # Without prompt text, the output loses the leading space that encoding adds to a text.
        self._strips = tokenizer.strips_leading_space and not any(
            map(self._bytes_of, prompt_token_ids)
        )
        self._tail = self._cut_character(prompt_token_ids)
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def append(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Return the text that `token_ids` add; "" after a stop string has matched.

        An incomplete character is held back, and so is a possible beginning of a stop string, unless `finished`.
        """
        if self.stop_reason is not None or not (token_ids or finished):
            return ""
        if self._stop_strings is not None:
            return self._append_until_stop(self._stop_strings, token_ids, finished)
        self.num_tokens += len(token_ids)
        return self._decode(token_ids)

    def append_as_json(self, token_id: int) -> bytes | None:
        """Append a token and return its text as JSON without quotes.

        If its text depends on other tokens, return None and append nothing.
        """
        if self._tail or self._strips or self._stop_strings is not None:
            return None
        if (text := self._json[token_id]) is not None:
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

    def _append_until_stop(
        self, stop_strings: StopStrings | StopPatterns, token_ids: Sequence[int], finished: bool
    ) -> str:
        protected = self._min_tokens - self.num_tokens
        if 0 < protected < len(token_ids):
            text = self._append_until_stop(stop_strings, token_ids[:protected], False)
            return text + self._append_until_stop(stop_strings, token_ids[protected:], finished)

        if len(token_ids) > 1 and stop_strings.needs_tokens:
            text = ""
            for number, token_id in enumerate(token_ids, 1):
                is_end = finished and number == len(token_ids)
                text += self._append_until_stop(stop_strings, (token_id,), is_end)
                if self.stop_reason is not None:
                    break
            return text

        tail, strips = self._tail, self._strips
        piece = self._decode(token_ids)
        text = self._held + piece
        match = stop_strings.find(piece, is_protected=protected > 0)
        if match is not None:
            self.stop_reason = match.text
            self._tail, self._strips = tail, strips
            self._consume_until(token_ids, match.end)
            end = len(self._held) + (match.end if self._include_stop else match.start)
            self._held = ""
            return text[:end]

        self.num_tokens += len(token_ids)
        cut = len(text) if finished else len(text) - stop_strings.num_possible
        self._held = text[cut:]
        return text[:cut]

    def _consume_until(self, token_ids: Sequence[int], num_chars: int) -> None:
        """Count the shortest prefix of `token_ids` that has at least `num_chars` characters as consumed."""
        for token_id in token_ids:
            self.num_tokens += 1
            num_chars -= len(self._decode((token_id,)))
            if num_chars <= 0:
                break

    def _cut_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the end of the prompt."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            if len(data) >= _LONGEST_CUT_CHARACTER:
                break
            data = self._bytes_of(token_id) + data
        return data[utf_8_decode(data, "replace", False)[1] :]
