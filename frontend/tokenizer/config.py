"""Read the tokenizer settings of a Hugging Face directory other than tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import TypeAlias

import msgspec

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import CheckpointError

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
"""The fields with more special tokens, as a list or by name. The second is the older name of the first."""

_DECODER = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


_Flags: TypeAlias = dict[str, dict[str, bool]]
"""Text of a token -> the flags that a file has for it."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The fields of tokenizer.json that are needed. Other fields, such as the vocabulary, are skipped."""

    added_tokens: list[_AddedToken] = []


class TokenizerConfig:
    """The fields of tokenizer_config.json and related files. Invalid fields raise CheckpointError.

    Attributes:
        named_tokens: bos_token, sep_token, image_token and so on, if present.
        added_tokens: The entries of `added_tokens_decoder`, by ID.

    A tokenizer_config.json with `added_tokens_decoder` is complete. Otherwise, special_tokens_map.json has precedence.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fields = ConfigFields.read_if_present(directory / "tokenizer_config.json")
        file = directory / "special_tokens_map.json"
        is_whole = _DECODER in self._fields.config
        self._map = ConfigFields({}, file) if is_whole else ConfigFields.read_if_present(file)
        self.named_tokens = {
            name: _token(fields, name)[0] for fields, name in self._fields_of_names()
        }
        self.added_tokens = sorted(self._added_tokens(), key=lambda added: added[0])

    @property
    def splits_special_tokens(self) -> bool:
        """True if special tokens in a text are encoded as ordinary text."""
        return self._fields.boolean("split_special_tokens", False)

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name. Those in files of their own replace those of tokenizer_config.json."""
        templates: dict[str, str] = {}
        in_json = ConfigFields.read_if_present(self._directory / "chat_template.json")
        if in_json.get("chat_template") is not None:
            templates["default"] = in_json.text("chat_template")
        for file in (self._directory / "additional_chat_templates").glob("*.jinja"):
            templates[file.stem] = _read_text(file)
        if (file := self._directory / "chat_template.jinja").is_file():
            templates["default"] = _read_text(file)
        own = dict(self._templates_of_config())
        if not templates:
            return own
        # Transformers has no default then.
        return ({"default": own["default"]} if "default" in own else {}) | templates

    def added_token_id(self, text: str) -> int | None:
        """Return the ID of the added token with this text, also of one in tokenizer.json; None if there is none.

        Raises:
            CheckpointError: tokenizer.json is not valid.
        """
        listed = ((id_, token.text("content", "")) for id_, token in self.added_tokens)
        found = (id_ for id_, content in chain(listed, self._tokens_of_file()) if content == text)
        return next(found, None)

    def _tokens_of_file(self) -> Iterator[tuple[int, str]]:
        path = self._directory / "tokenizer.json"
        if path.is_file():
            try:
                tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
            except msgspec.DecodeError as error:
                raise CheckpointError(
                    path, f"not a valid tokenizer ({error}); download it again"
                ) from error
            yield from ((token.id, token.content) for token in tokens)

    def special_tokens(self) -> tuple[_Flags, _Flags]:
        """Return the flags of special tokens that have a name, such as `sep_token`, and of those in lists, by text."""
        named = dict(_token(fields, name) for fields, name in self._fields_of_names())
        listed: _Flags = {}
        for fields, name in product((self._fields, self._map), _LISTS):
            # Only one list is used.
            found = {} if listed else fields.get(name, {})
            if isinstance(found, list):
                each = ConfigFields(
                    {str(i): x for i, x in enumerate(found)}, fields.path, f"{name}."
                )
                listed.update(_token(each, key) for key in each.config)
        return named, listed

    def _fields_with(self, name: str) -> ConfigFields:
        return self._map if name in self._map.config else self._fields

    def _fields_of_names(self) -> Iterator[tuple[ConfigFields, str]]:
        """Yield the names of tokens and the fields that have them."""
        for name in dict.fromkeys([*self._fields.config, *self._map.config]):
            fields = self._fields_with(name)
            value = fields.get(name)
            is_named = name in _NAMED and value is not None
            if is_named or (name.endswith("_token") and isinstance(value, str | dict)):
                yield fields, name
        for fields, name in product((self._fields, self._map), _LISTS):
            if fields.get(name) and not isinstance(fields.get(name), list):
                each = fields.required_section(name)
                yield from ((each, key) for key in each.config)

    def _added_tokens(self) -> Iterator[tuple[int, ConfigFields]]:
        listed = self._fields.first_section(_DECODER)
        for id_ in listed.config:
            if not id_.isdecimal():
                raise listed.error(f"{listed.prefix}{id_}: {id_!r} is not a token id")
            yield int(id_), listed.required_section(id_)

    def _templates_of_config(self) -> Iterator[tuple[str, str]]:
        templates = self._fields.get("chat_template")
        if not isinstance(templates, list):
            if templates is not None:
                yield "default", self._fields.text("chat_template")
            return
        by_index = ConfigFields(
            {str(i): template for i, template in enumerate(templates)},
            self._fields.path,
            "chat_template.",
        )
        for index in by_index.config:
            template = by_index.required_section(index)
            yield template.text("name"), template.text("template")


def token_flags(token: ConfigFields) -> dict[str, bool]:
    """Return the flags of an added token that its fields have."""
    return {flag: token.boolean(flag, False) for flag in _FLAGS if flag in token.config}


def _token(fields: ConfigFields, name: str) -> tuple[str, dict[str, bool]]:
    """Return the text and the flags of a token, which is stored as a string or as {"content": ...}."""
    if isinstance(fields.get(name), dict):
        token = fields.required_section(name)
        return token.text("content"), token_flags(token)
    return fields.text(name), {"special": True}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(file, f"cannot be read: {error}") from error
