"""Convert the tokenizer of a Kimi model that is published as `tiktoken.model`.

Each line of the file has a token in base64, and its rank. The special tokens, whose ids come after those of all other
tokens, are in tokenizer_config.json.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe, byte_level, byte_texts, merges_of
from .pretokenizers import PRE_TOKENIZERS

_MODEL: Final = "tiktoken.model"
_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_CLASS: Final = "TikTokenTokenizer"
_NUM_SPECIAL: Final = 256


def kimi_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    needed = [directory / _MODEL, directory / _CONFIG]
    if not all(path.is_file() for path in needed):
        return []
    return [*needed, *(file for file in [directory / _TEMPLATE_FILE] if file.is_file())]


def convert_kimi(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or the tokenizer is not that of a Kimi.
    """
    config = ConfigFields.read_if_present(directory / _CONFIG)
    if (name := config.text("tokenizer_class", "")) != _CLASS:
        raise CheckpointError(
            directory,
            f"{_MODEL} is read only for the tokenizer_class {_CLASS}, got {name!r}; "
            "convert the tokenizer to tokenizer.json",
        )
    path = directory / _MODEL
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"not a tokenizer of tiktoken: {error}") from error
    count = len(ranks)
    if sorted(ranks) != list(range(count)) or len(set(ranks.values())) != len(lines):
        raise CheckpointError(path, f"its {len(lines)} tokens must have different ranks from 0")
    texts = byte_texts([ranks[rank] for rank in range(count)])
    listed = config.first_section("added_tokens_decoder")
    special = [
        (token.text("content", f"<|reserved_token_{index}|>"), token.boolean("special", True))
        for index in range(count, count + _NUM_SPECIAL)
        for token in [listed.first_section(str(index))]
    ]
    scheme = PRE_TOKENIZERS["kimi-k2"]
    model = bpe(texts, merges_of(texts), ignore_merges=True)
    tokenizer = {
        **HEAD,
        "added_tokens": [
            added_token(count + i, content, special=is_special)
            for i, (content, is_special) in enumerate(special)
        ],
        "post_processor": None,
        **byte_level(scheme.patterns, model),
    }
    converted = dict(config.config)
    if (template := directory / _TEMPLATE_FILE).is_file():
        converted["chat_template"] = template.read_text(encoding="utf-8")
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": converted}
