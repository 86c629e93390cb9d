"""The tokenizer of one model, based on the tokenizers library."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from ...protocol.checkpoint.config_fields import ConfigFields
from .long_texts import LONG_TEXT, LongTexts
from .text_pairs import PairJoiner
from .text_pieces import encode_text, encode_with_offsets
from .token_bytes import TokenBytes, TokenJson, TokenTexts, parse_decoding


class Tokenizer:
    """Encodes prompts and decodes tokens. It is thread-safe, and encoding releases the GIL.

    Prompts of an encoder-decoder model are sources, which may have a tokenizer of their own, `source`.

    Attributes:
        path: The tokenizer.json of the model.
        named_tokens: Names ("bos_token", "sep_token", "image_token", ...) -> texts of tokens, as in its files.
        chat_templates: Names ("default", "tool_use", ...) -> Jinja sources.

    Raises:
        ValueError: The decoder is not supported.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        *,
        source: tokenizers.Tokenizer | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        for each in (backend, source or backend):
            each.no_truncation()
            each.no_padding()
        self._backend = backend
        self._prompt_backend = source or backend
        self.path = path
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token, self.bos_token_id = bos_token, self._named(bos_token)
        self.eos_token, self.eos_token_id = eos_token, self._named(eos_token)
        self.pad_token, self.pad_token_id = pad_token, self._named(pad_token)
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(chat_templates or {})

        decoder = backend.decoder
        decoding = parse_decoding(json.loads(decoder.__getstate__()) if decoder else None)
        self.strips_leading_space = decoding.strips_leading_space
        self._bytes = TokenBytes(backend.id_to_token, decoding.to_bytes)
        self._visible_bytes = TokenBytes(
            backend.id_to_token, decoding.to_bytes, hidden=self.special_ids
        )

        self._long_texts: LongTexts | None = None
        self._pair_joiner: PairJoiner | None = None
        self._texts = TokenTexts(self._bytes)
        self._visible_texts = TokenTexts(self._visible_bytes)
        self._json = TokenJson(self._texts)
        self._visible_json = TokenJson(self._visible_texts)

    def read_config(self) -> dict[str, Any]:
        """Return the fields of tokenizer_config.json; none if the model has no such file."""
        return dict(ConfigFields.read_if_present(self.path.parent / "tokenizer_config.json").config)

    def _named(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def move_long_texts(self) -> None:
        """From now on, encode long texts in other processes. Must be called before `literal_encoder`."""
        self._long_texts = LongTexts(self.path.parent)

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the token IDs of `text`. Special tokens in the text are recognized.

        Raises:
            ParameterError: The vocabulary lacks some of the text, or the text is long and needs too much memory.
        """
        if self._long_texts is not None and len(text) > LONG_TEXT:
            return self._long_texts.encode(text, add_special_tokens=add_special_tokens)
        found = encode_text(self._prompt_backend, text, add_special_tokens=add_special_tokens)
        return found.token_ids

    def encode_with_places(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token IDs of `text`, and the characters of each: start and end, equal for special tokens."""
        found = encode_with_offsets(
            self._prompt_backend, text, add_special_tokens=add_special_tokens
        )
        return found.ids, found.offsets

    def encode_output(self, text: str) -> Sequence[int]:
        """Return the token IDs of a text that the model writes, without special tokens around it."""
        if self._prompt_backend is self._backend:
            return self.encode(text, add_special_tokens=False)
        return encode_text(self._backend, text, add_special_tokens=False).token_ids

    @property
    def pair_joiner(self) -> PairJoiner:
        """The object that joins two texts that were encoded without special tokens."""
        if self._pair_joiner is None:
            self._pair_joiner = PairJoiner(self._backend)
        return self._pair_joiner

    def special_tokens(self) -> list[str]:
        """Return the tokens that are special wherever they occur in a text."""
        added = self._backend.get_added_tokens_decoder()
        named = (self.bos_token, self.eos_token, self.pad_token)
        return [t.content for t in added.values() if t.special or t.content in named]

    def literal_encoder(self) -> LiteralEncoder:
        """Return an encoder that can encode special tokens as ordinary text."""
        return LiteralEncoder(self._prompt_backend, self.special_tokens(), self._long_texts)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`. Invalid UTF-8 becomes U+FFFD."""
        # Other threads can run during a list comprehension, but not during `map`.
        bytes_by_id = self.bytes_by_id(skip_special_tokens)
        data = b"".join([bytes_by_id[token_id] for token_id in token_ids])
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def text_by_id(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Return a mapping from token ID to text; None if the text depends on adjacent tokens."""
        return self._visible_texts if skip_special_tokens else self._texts

    def json_by_id(self, skip_special_tokens: bool) -> Mapping[int, bytes | None]:
        """Return the mapping of `text_by_id` with the texts as JSON without quotes."""
        return self._visible_json if skip_special_tokens else self._json

    def bytes_by_id(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Return a mapping from token ID to the bytes that the token adds to a text."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not; b"" for an ID without a token."""
        return self._bytes[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as spelled in the vocabulary."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def vocabulary(self, *, has_added: bool = True) -> dict[str, int]:
        """Return the IDs of all tokens by their spelling, with or without those that were added."""
        vocabulary: dict[str, int] = self._backend.get_vocab(has_added)
        return vocabulary

    def token_to_id(self, token: str) -> int | None:
        """Return the ID of a token; None if it is not in the vocabulary."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


class LiteralEncoder:
    """Encodes special tokens in a text as ordinary characters, except where they are written in their `spelling`.

    The `spelling` of a special token is its number between two characters U+FDD1, which clients' texts may not contain.
    Spellings have the same flags as their tokens, so text is split at them in the same way.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Sequence[str],
        long_texts: LongTexts | None = None,
    ) -> None:
        self._long_texts = long_texts
        content = json.loads(backend.to_str())
        for added in content["added_tokens"]:
            added["special"] |= added["content"] in special_tokens
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        # The encoder does not recognize special tokens in a text.
        self._backend.encode_special_tokens = True
        flags = {added.content: added for added in backend.get_added_tokens_decoder().values()}
        self._spellings = {token: f"\ufdd1{i}\ufdd1" for i, token in enumerate(special_tokens)}
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    spelling,
                    single_word=flags[token].single_word,
                    lstrip=flags[token].lstrip,
                    rstrip=flags[token].rstrip,
                    normalized=False,
                    special=False,
                )
                for token, spelling in self._spellings.items()
            ]
        )
        self._ids: dict[int, int] = {}
        for token, spelling in self._spellings.items():
            token_id, alias = backend.token_to_id(token), self._backend.token_to_id(spelling)
            assert token_id is not None and alias is not None
            self._ids[alias] = token_id
        self._special_ids = frozenset(self._ids.values())

    def spelling(self, special_token: str) -> str:
        """Return the text that `encode` recognizes as the token."""
        return self._spellings[special_token]

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        """Return the token IDs of a text.

        Raises:
            ParameterError: The text is long and needs too much memory.
            ValueError: The tokenizer produces a special token for ordinary text, as some word-level models do.
        """
        if self._long_texts is not None and len(text) > LONG_TEXT:
            return self._long_texts.encode(
                text, add_special_tokens=add_special_tokens, special_is_text=True
            )
        token_ids, before, after = encode_text(
            self._backend, text, add_special_tokens=add_special_tokens
        )
        for token_id in islice(token_ids, before, len(token_ids) - after):
            if token_id in self._special_ids:
                token = self._backend.id_to_token(token_id)
                raise ValueError(
                    f'must not contain the special token "{token}": '
                    "the tokenizer of this model cannot encode it as text"
                )
        return array("i", (self._ids.get(token_id, token_id) for token_id in token_ids))
