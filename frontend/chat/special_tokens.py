"""Keep clients from injecting special tokens through the text of chat messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from ...protocol.config.frontend import SpecialTokenPolicy
from ...protocol.errors import ParameterError
from ..tokenizer.tokenizer import Tokenizer

_MARK: Final = "\ufdd0"
"""A Unicode noncharacter.

It is inserted into special tokens in text, so that they stay text until the prompt is encoded.
"""

_RESERVED: Final = re.compile("[\ufdd0\ufdd1]")
"""Characters that requests may not contain: the mark, and the character that delimits `LiteralEncoder` spellings."""

_MARKS_IN_OUTPUT: Final = re.compile(r"\ufdd0|\\ufdd0")
"""The mark, either literally or as `tojson(ensure_ascii=True)` writes it."""

_STANDARD_ROLES: Final = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython")
)
_WINDOW: Final = 1 << 16
"""Maximum characters of one search, because a search blocks all other threads."""


class SpecialTokenGuard:
    """Prevents special tokens in the text of requests from being interpreted, unless the policy is "allow".

    "escape" encodes them as ordinary characters; "refuse" raises ParameterError. The model's own messages may contain
    `own_marks`, the special tokens that mark reasoning and calls. This class is thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer, policy: SpecialTokenPolicy, own_marks: Collection[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        tokens = [] if policy == "allow" else tokenizer.special_tokens()
        self._refuses = policy == "refuse"
        self._is_active = bool(tokens)
        self._own_marks = frozenset(own_marks)
        if not tokens:
            return
        self._tokens = tokens
        self._longest = max(map(len, tokens))
        self._pattern = re.compile(_any_of(tokens))
        self._beginnings = {token[:n] for token in tokens for n in range(1, len(token))}
        self._endings = {token[n:] for token in tokens for n in range(1, len(token))}
        self._literal = tokenizer.literal_encoder()

    def protect_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a protected copy of normalized messages.

        Raises:
            ParameterError: A field contains a special token and the policy is "refuse".
        """
        if not self._is_active:
            return messages
        protected = []
        for i, message in enumerate(messages):
            own = self._own_marks if message["role"] == "assistant" else frozenset()
            copy = self._protect(message, f"messages[{i}]", own)
            if message["role"] not in _STANDARD_ROLES:
                copy["role"] = self._protect_role(copy["role"])
            protected.append(copy)
        return protected

    def protect(self, value: Any, where: str) -> Any:
        """Return a protected copy of a JSON value.

        Raises:
            ParameterError: The value contains a special token and the policy is "refuse", or it is nested too deeply.
        """
        if not self._is_active:
            return value
        try:
            return self._protect(value, where, frozenset())
        except RecursionError:
            raise ParameterError(where, "is nested too deeply; use fewer levels") from None

    def encode(self, prompt: str, add_special_tokens: bool) -> tuple[str, Sequence[int]]:
        """Return the text and the tokens of a prompt that was rendered from protected messages.

        Raises:
            ParameterError: The text contains special tokens that this tokenizer always interprets.
        """
        if not self._is_active or not _MARKS_IN_OUTPUT.search(prompt):
            return prompt, self._tokenizer.encode(prompt, add_special_tokens)
        pieces: list[str] = []
        end = 0
        for match in self._find(prompt):
            pieces += (prompt[end : match.start()], self._literal.spelling(match[0]))
            end = match.end()
        pieces.append(prompt[end:])
        literal = _MARKS_IN_OUTPUT.sub("", "".join(pieces))
        try:
            token_ids = self._literal.encode(literal, add_special_tokens)
        except ValueError as error:
            raise ParameterError("messages", str(error)) from None
        return _MARKS_IN_OUTPUT.sub("", prompt), token_ids

    def encode_whole(self, prompt: str) -> tuple[str, Sequence[int]]:
        """Return the text and the tokens of a prompt to which the tokenizer adds the special tokens.

        The first of them may also have been written by the template. It is not added twice.
        """
        start = self._tokenizer.bos_token
        if start and prompt.startswith(start) and adds_bos(self._tokenizer):
            prompt = prompt.removeprefix(start)
        return self.encode(prompt, add_special_tokens=True)

    def _protect(self, value: Any, where: str, own: Collection[str]) -> Any:
        if isinstance(value, str):
            return self._protect_text(value, where, own)
        if isinstance(value, Mapping):
            return {
                self._protect_text(key, where, own): self._protect(item, f"{where}.{key}", own)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._protect(item, f"{where}[{i}]", own) for i, item in enumerate(value)]
        return value

    def _protect_text(self, text: str, where: str, own: Collection[str]) -> str:
        text = _RESERVED.sub("\ufffd", text)
        pieces: list[str] = []
        end = 0
        for match in self._find(text):
            if match[0] in own:
                continue
            if self._refuses:
                raise ParameterError(
                    where,
                    f'must not contain the special token "{match[0]}": '
                    "remove it, because the server runs with --special-tokens-in-text=refuse",
                )
            pieces += (text[end : match.start() + 1], _MARK)
            end = match.start() + 1
        return self._protect_edges("".join([*pieces, text[end:]]))

    def _protect_edges(self, text: str) -> str:
        """Add marks at the ends of a text that could form a special token together with adjacent text of the prompt."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(1, min(self._longest, end - start + 1))
        if any(text[end - n : end] in self._beginnings for n in sizes):
            text = text[:end] + _MARK + text[end:]
        if any(text[start : start + n] in self._endings for n in sizes):
            text = text[:start] + _MARK + text[start:]
        return text

    def _protect_role(self, role: str) -> str:
        """Protect a role, which templates write between their own characters, as in `<|ROLE|>`."""
        if any(role in token for token in self._tokens):
            return role[:1] + _MARK + role[1:]
        return role

    def _find(self, text: str) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(text):
            match = self._pattern.search(text, at, at + _WINDOW)
            if match is not None:
                yield match
                at = match.end()
            elif at + _WINDOW >= len(text):
                return
            else:
                at += _WINDOW - self._longest + 1


def _any_of(tokens: Collection[str]) -> str:
    """Return a regular expression for the longest of `tokens` that reads each character once per position."""
    if len(tokens) == 1:
        return re.escape(next(iter(tokens)))
    followers: dict[str, list[str]] = {}
    for token in tokens:
        if token:
            followers.setdefault(token[0], []).append(token[1:])
    branches = [re.escape(first) + _any_of(rests) for first, rests in followers.items()]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in tokens else "")


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Return whether texts begin with BOS if they are encoded with special tokens."""
    first = [*tokenizer.encode("", add_special_tokens=True)][:1]
    return bool(first) and first[0] == tokenizer.bos_token_id
