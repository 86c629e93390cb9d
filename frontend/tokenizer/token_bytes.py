"""The bytes of each token.

A token may contain a part of a character. So the text of several tokens is the UTF-8 decoding of their joined bytes.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies.

    Printable bytes are the characters themselves; others start at U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token in a byte-level vocabulary. Added tokens may be plain text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _replaced_bytes(replacements: list[tuple[str, str]], token: str) -> bytes:
    """Return the bytes of a token in a byte-level vocabulary after replacements."""
    return byte_level_bytes(_replaced(token, replacements))


def _replaced(token: str, replacements: list[tuple[str, str]]) -> str:
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token


def _word_piece_bytes(prefix: str, token: str) -> bytes:
    """Return the bytes of a word piece. A piece that starts with `prefix` continues the word before it."""
    if token.startswith(prefix):
        return token.removeprefix(prefix).encode()
    return f" {token}".encode()


class Decoding(msgspec.Struct, frozen=True):
    """The rules that convert a vocabulary's tokens to text."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool
    """True if one space at the very start of a text is an artifact of encoding."""


def parse_decoding(decoder: dict[str, Any] | None) -> Decoding:
    """Return the decoding described by the `decoder` section of a tokenizer.json.

    Raises:
        ValueError: The decoder cannot be applied to single tokens.
    """
    if decoder is None:
        # The tokens are joined by spaces.
        return Decoding(lambda token: f" {token}".encode(), strips_leading_space=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback = strips = fused = False
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"} if replacements:
                to_bytes = partial(_replaced_bytes, replacements)
                return Decoding(to_bytes, strips_leading_space=False)
            case {"type": "ByteLevel"}:
                return Decoding(byte_level_bytes, strips_leading_space=False)
            case {"type": "WordPiece", "prefix": str(prefix)}:
                return Decoding(partial(_word_piece_bytes, prefix), strips_leading_space=True)
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                strips = bool(start)
            case {"type": "Metaspace", "replacement": str(replacement)}:
                replacements.append((replacement, " "))
                strips = step.get("prepend_scheme", "always") != "never"
            case _:
                raise ValueError(f"a token decoder of type {step.get('type')!r} is not supported")

    def piece_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return _replaced(token, replacements).encode()

    return Decoding(piece_bytes, strips)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for nested in decoder["decoders"] for step in _steps(nested)]


class TokenBytes(dict[int, bytes]):
    """Token ID -> bytes, filled on first use so that it does not slow down startup.

    Hidden IDs, and IDs without a token, have b"".
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        hidden: Container[int] = (),
    ) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._id_to_token(token_id)
        self[token_id] = data = b"" if token is None else self._to_bytes(token)
        return data


class TokenTexts(dict[int, str | None]):
    """Token ID -> text, filled on first use; None if the bytes are not whole characters."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        data = self._token_bytes[token_id]
        text, consumed = utf_8_decode(data, "replace", False)
        self[token_id] = whole = text if consumed == len(data) else None
        return whole


class TokenJson(dict[int, bytes | None]):
    """Token ID -> text as JSON without quotes, filled on first use; None if the bytes are not whole characters."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> bytes | None:
        text = self._texts[token_id]
        self[token_id] = whole = None if text is None else msgspec.json.encode(text)[1:-1]
        return whole
