"""Convert the tokenizers of Kimi models and of Phi-3-small, which are published in files of tiktoken.

Each line of the file has a token in base64, and its rank. The ids of special tokens come after those of all other
tokens. Those of Kimi are in tokenizer_config.json, and those of Phi-3-small in the Python code of its checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe, byte_level, byte_texts, merges_of
from .pretokenizers import PRE_TOKENIZERS

_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_NUM_SPECIAL: Final = 256
_KIMI: Final = ("tiktoken.model", "TikTokenTokenizer", "kimi-k2")
_PHI: Final = ("cl100k_base.tiktoken", "Phi3SmallTokenizer", "dbrx")
"""The file, the class in tokenizer_config.json, and the name of the pre-tokenizer."""
_SPECIAL_OF_PHI: Final = (
    *("dummy_id_2", "endoftext", "fim_prefix", "fim_middle", "fim_suffix", "system", "user"),
    *("assistant", "dummy_id_0", "dummy_id_1", "end"),
    *(f"dummy_id_{index}" for index in range(3, 12)),
    "endofprompt",
    *(f"dummy_id_{index}" for index in range(12, 87)),
)
"""The special tokens of Phi-3-small without their brackets, in the order of their ids."""


def kimi_files(directory: Path) -> list[Path]:
    """Return the files of a Kimi's tokenizer; none if the directory has no such tokenizer."""
    return _files(directory, _KIMI[0])


def phi_files(directory: Path) -> list[Path]:
    """Return the files of a Phi-3-small's tokenizer; none if the directory has no such tokenizer."""
    return _files(directory, _PHI[0])


def convert_kimi(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or the tokenizer is not that of a Kimi.
    """
    config = _read_config(directory, *_KIMI[:2])
    ranks = _read_ranks(directory / _KIMI[0])
    listed = config.first_section("added_tokens_decoder")
    special = [
        (token.text("content", f"<|reserved_token_{index}|>"), token.boolean("special", True))
        for index in range(len(ranks), len(ranks) + _NUM_SPECIAL)
        for token in [listed.first_section(str(index))]
    ]
    return _convert(directory, config, ranks, special, _KIMI[2])


def convert_phi(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: A file is damaged, or the tokenizer is not that of a Phi-3-small.
    """
    config = _read_config(directory, *_PHI[:2])
    special = [(f"<|{name}|>", True) for name in _SPECIAL_OF_PHI]
    config = config.with_defaults(eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    return _convert(directory, config, _read_ranks(directory / _PHI[0]), special, _PHI[2])


def _files(directory: Path, name: str) -> list[Path]:
    needed = [directory / name, directory / _CONFIG]
    if not all(path.is_file() for path in needed):
        return []
    return [*needed, *(file for file in [directory / _TEMPLATE_FILE] if file.is_file())]


def _read_config(directory: Path, file: str, wanted: str) -> ConfigFields:
    config = ConfigFields.read_if_present(directory / _CONFIG)
    if (name := config.text("tokenizer_class", "")) != wanted:
        raise CheckpointError(
            directory,
            f"{file} is read only for the tokenizer_class {wanted}, got {name!r}; "
            "convert the tokenizer to tokenizer.json",
        )
    return config


def _read_ranks(path: Path) -> list[bytes]:
    """Return the tokens in the order of their ranks."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"not a tokenizer of tiktoken: {error}") from error
    count = len(ranks)
    if sorted(ranks) != list(range(count)) or len(set(ranks.values())) != len(lines):
        raise CheckpointError(path, f"its {len(lines)} tokens must have different ranks from 0")
    return [ranks[rank] for rank in range(count)]


def _convert(
    directory: Path,
    config: ConfigFields,
    ranks: Sequence[bytes],
    special: Sequence[tuple[str, bool]],
    name: str,
) -> dict[str, dict[str, Any]]:
    """Return the contents of the files, given the special tokens and whether decoding skips them."""
    texts = byte_texts(ranks)
    model = bpe(texts, merges_of(texts), ignore_merges=True)
    tokenizer = {
        **HEAD,
        "added_tokens": [
            added_token(len(ranks) + i, content, special=is_special)
            for i, (content, is_special) in enumerate(special)
        ],
        "post_processor": None,
        **byte_level(PRE_TOKENIZERS[name].patterns, model),
    }
    converted = dict(config.config)
    if (template := directory / _TEMPLATE_FILE).is_file():
        converted["chat_template"] = template.read_text(encoding="utf-8")
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": converted}
