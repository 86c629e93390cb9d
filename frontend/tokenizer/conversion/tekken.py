"""Convert the tokenizer of a Mistral model that is published as `tekken.json`, without a chat template.

The file has the bytes of each token in the order of their ranks, and the chat format has a version. The templates write
what mistral-common 1.13 writes for versions 3, 7, 11 and 13.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, bpe, byte_level, byte_texts, merges_of, surround

_TEKKEN: Final = "tekken.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_CHAT_TEMPLATE: Final = Path(__file__).with_name("tekken.jinja")
_VERSIONS: Final = ("v3", "v7", "v11", "v13")
_OLD_SPECIAL_TOKENS: Final = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
"""The special tokens of files that do not list them."""


class _Config(msgspec.Struct):
    pattern: str
    version: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str = ""
    token_str: str | None = None


class _Tekken(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Token] | None = None


def tekken_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    path = directory / _TEKKEN
    if not path.is_file():
        return []
    return [path, *(file for file in [directory / _TEMPLATE_FILE] if file.is_file())]


def convert_tekken(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json. Raise CheckpointError if the file is damaged."""
    path = directory / _TEKKEN
    try:
        tekken = msgspec.json.decode(path.read_bytes(), type=_Tekken)
        special = _special_tokens(tekken)
        num_ordinary = tekken.config.default_vocab_size - len(special)
        tokens = [base64.b64decode(token.token_bytes) for token in tekken.vocab[:num_ordinary]]
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"not a tokenizer of Mistral: {error}") from error
    if len(set(tokens)) != num_ordinary or any(
        after.rank != before.rank + 1 for before, after in pairwise(tekken.vocab[:num_ordinary])
    ):
        raise CheckpointError(path, f"its vocab must have {num_ordinary} tokens in order of rank")
    texts = byte_texts(tokens)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if (template := _chat_template(directory, tekken.config.version)) is not None:
        config["chat_template"] = template
    model = bpe([*special, *texts], merges_of(texts), ignore_merges=True)
    tokenizer = {
        **HEAD,
        "added_tokens": [added_token(i, text, special=True) for i, text in enumerate(special)],
        "post_processor": surround(special, ["<s>"], []),
        **byte_level([tekken.config.pattern], model),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _special_tokens(tekken: _Tekken) -> list[str]:
    """Return the special tokens in the order of their ids, which come before all others."""
    listed = dict(enumerate(_OLD_SPECIAL_TOKENS))
    if tekken.special_tokens:
        listed = {token.rank: token.token_str or "" for token in tekken.special_tokens}
    count = tekken.config.default_num_special_tokens
    tokens = [listed.get(index) or f"<SPECIAL_{index}>" for index in range(count)]
    if missing := {"<unk>", "<s>", "</s>", "<pad>"}.difference(tokens):
        raise ValueError(f"there is no special token {min(missing)}")
    return tokens


def _chat_template(directory: Path, version: str) -> str | None:
    """Return the template of the directory, or else that of the version; None if it is not known."""
    file = directory / _TEMPLATE_FILE
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(file, f"cannot be read: {error}") from error
    # The version of a model that reads images may end in m1.
    version = version.removesuffix("m1")
    if version not in _VERSIONS:
        return None
    # The format of reasoning is chosen by its mark in the template.
    reasoning = _REASONING_TEMPLATE if version == "v13" else ""
    template = _CHAT_TEMPLATE.read_text(encoding="utf-8").replace("%REASONING%", reasoning)
    return f"{{%- set version = {version[1:]} %}}\n{template}"


_REASONING_TEMPLATE: Final = """\
{%- if message.reasoning_content %}
{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
{%- endif %}
"""
