"""The tokenizer of one model."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

from .token_bytes import TokenBytes, TokenTexts, decoding_of


class Tokenizer:
    """Encodes prompts and decodes tokens. Safe to share between threads; encoding frees the GIL.

    `path` is the tokenizer.json it was read from. `chat_templates` maps names ("default",
    "tool_use", ...) to Jinja sources. Raises ValueError for a decoder it cannot work with.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.path = path
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token, self.bos_token_id = bos_token, self._named(bos_token)
        self.eos_token, self.eos_token_id = eos_token, self._named(eos_token)
        self.pad_token, self.pad_token_id = pad_token, self._named(pad_token)
        self.chat_templates = dict(chat_templates or {})

        decoder = backend.decoder
        decoding = decoding_of(json.loads(decoder.__getstate__()) if decoder else None)
        self.strips_leading_space = decoding.strips_leading_space
        self._bytes = TokenBytes(backend.id_to_token, decoding.to_bytes)
        self._visible_bytes = TokenBytes(
            backend.id_to_token, decoding.to_bytes, hidden=self.special_ids
        )

        self._texts = TokenTexts(self._bytes)
        self._visible_texts = TokenTexts(self._visible_bytes)

    def _named(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(map(self.bytes_of(skip_special_tokens).__getitem__, token_ids))
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def text_of(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Token id -> the text it contributes to any text; None where that depends on its neighbours."""
        return self._visible_texts if skip_special_tokens else self._texts

    def bytes_of(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Token id -> the bytes it contributes to a text; b"" where it contributes none."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; b"" for an id without a token."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id
