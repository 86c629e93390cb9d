"""Read the settings of a tokenizer that are beside its vocabulary, for the formats of older classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ..config import TokenizerConfig, token_flags

_ADDED: Final = "added_tokens.json"
_CONFIG: Final = "tokenizer_config.json"
_FILES: Final = (
    *(_CONFIG, "special_tokens_map.json", _ADDED, "chat_template.json", "chat_template.jinja"),
    "config.json",
)


def settings_files(directory: Path) -> list[Path]:
    """Return the files with settings of a tokenizer that are in a directory."""
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    return [path for name in _FILES if (path := directory / name).is_file()] + others


class Settings:
    """The settings of a tokenizer, with the defaults of its class for the named tokens."""

    def __init__(self, directory: Path) -> None:
        self.fields = ConfigFields.read_if_present(directory / _CONFIG)
        self._config = TokenizerConfig(directory)
        model = ConfigFields.read_if_present(directory / "config.json")
        self.model_type = model.text("model_type", "")
        name = self.fields.text("tokenizer_class", model.text("tokenizer_class", ""))
        self.tokenizer_class = name.removesuffix("Fast")
        """The name of the class without the suffix of its faster version; empty if no file has it."""
        added = ConfigFields.read_if_present(directory / _ADDED)
        self.added = {added.integer(token, minimum=0): token for token in added.config}
        """The tokens that are not in the vocabulary, by ID."""
        self.special: set[str] = set()
        """The texts of the added tokens that are special."""
        for id_, fields in self._config.added_tokens:
            self.added[id_] = fields.text("content")
            if fields.boolean("special", False):
                self.special.add(self.added[id_])

    def named(self, **defaults: str) -> dict[str, str]:
        """Return `bos_token` and so on, with defaults for those that no file has."""
        return {
            f"{name}_token": text for name, text in defaults.items()
        } | self._config.named_tokens

    def with_flags(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the added tokens of a tokenizer.json with the flags that tokenizer_config.json has for them."""
        flags = {id_: token_flags(fields) for id_, fields in self._config.added_tokens}
        return [token | flags.get(token["id"], {}) for token in added]

    def content(self, named: dict[str, str]) -> dict[str, Any]:
        """Return the content of a tokenizer_config.json with these named tokens."""
        templates = self._config.chat_templates()
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        added = self.fields.get("added_tokens_decoder", {})
        content = named | {"added_tokens_decoder": added}
        return content | ({"chat_template": listed} if listed else {})
