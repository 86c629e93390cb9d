"""The files of a checkpoint that describe image preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....protocol.checkpoint.config_fields import ConfigFields


@dataclass(frozen=True)
class ProcessorSource:
    """The fields of the image processor and of the model's config, and the directory `path` of the checkpoint.

    `tokens` maps names of special tokens to their texts, for checkpoints whose files lack them.
    """

    path: Path
    fields: ConfigFields
    config: ConfigFields
    tokens: Mapping[str, str]

    def special_token(self, name: str) -> str:
        """Return the text of a special token, which tokenizer_config.json names.

        Raises:
            CheckpointError: The file does not name the token.
        """
        if name in self.tokens:
            return self.tokens[name]
        fields = ConfigFields.read_if_present(self.path / "tokenizer_config.json")
        token = fields.get(name)
        if isinstance(token, dict):
            return ConfigFields(token, fields.path, f"{name}.").text("content")
        return fields.text(name)
