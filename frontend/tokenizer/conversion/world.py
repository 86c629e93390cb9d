"""Convert the tokenizer of RWKV models, which always takes the longest token that the rest of a text begins with.

The tokenizers library has no such model. But a regular expression made of the tree of all tokens matches the longest
one, so the library can divide a text into words that are tokens.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.errors import CheckpointError
from .parts import HEAD, added_token, byte_texts

_CONFIG: Final = "tokenizer_config.json"
_OTHERS: Final = (_CONFIG, "special_tokens_map.json", "chat_template.jinja")
_END: Final = "<|rwkv_tokenizer_end_of_text|>"
"""The text of token 0, which is not in the vocabulary, if no file names it."""
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CONTROL: Final = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_Tree: TypeAlias = dict[str, "_Tree"]
_IS_TOKEN: Final = ""
"""The key of a node of the tree at which a token ends."""

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- set role = {'system': 'System', 'assistant': 'Assistant'}.get(message.role, 'User') -%}"
    "{{- role + ': ' + message.content | trim + '\\n\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
"""The chat template that GGUF files call rwkv-world."""


def world_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in this format; none if the directory has no such tokenizer."""
    found = sorted(directory.glob("rwkv_vocab_*.txt"))[:1]
    return found and [*found, *(path for name in _OTHERS if (path := directory / name).is_file())]


def convert_world(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Transformers adds a token for a named one that is in the vocabulary, such as an eos_token of two line breaks. The
    model was not trained with it, so it is not added here.

    Raises:
        CheckpointError: The vocabulary or an added token is damaged.
    """
    [path, *_] = world_files(directory)
    tokens = _read_vocabulary(path)
    known = set(tokens.values())
    config = ConfigFields.read_if_present(directory / _CONFIG)
    entries = config.first_section("added_tokens_decoder")
    named = {
        int(index): entries.required_section(index) for index in entries.config if index.isdecimal()
    }
    listed: dict[int, dict[str, Any]] = {
        index: {"content": text, "special": token.boolean("special", True)}
        for index, token in named.items()
        if (text := token.text("content")).encode() not in known
    }
    others = ConfigFields.read_if_present(directory / "special_tokens_map.json").config
    listed.setdefault(0, {"content": _END, "special": True})
    tokenizer = {
        **HEAD,
        "added_tokens": [
            added_token(index, token["content"], special=token["special"])
            for index, token in sorted(listed.items())
        ],
        "post_processor": None,
        **longest_match(tokens, {index: token["content"] for index, token in listed.items()}),
    }
    converted = {**others, **config.config, "added_tokens_decoder": {}}
    if (template := directory / "chat_template.jinja").is_file():
        converted["chat_template"] = template.read_text(encoding="utf-8")
    return {"tokenizer.json": tokenizer, _CONFIG: converted}


def world_eos(directory: Path, eos_token: str | None) -> list[int]:
    """Return the ids of tokens that end a text: the named one, if the vocabulary has it, and token 0.

    [] if the directory has no tokenizer in this format, or another one as well.
    """
    found = world_files(directory)
    if not found or (directory / "tokenizer.json").is_file():
        return []
    data = b"" if eos_token is None else eos_token.encode()
    with found[0].open(encoding="utf-8") as file:
        tokens = dict(_token(line.strip("\n")) for line in file if line.endswith(f" {len(data)}\n"))
    return [*(index for index, token in tokens.items() if token == data), 0]


def longest_match(tokens: Mapping[int, bytes], added: Mapping[int, str]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for tokens by their ids, which must include every byte.

    The texts of `added` tokens are not matched. The vocabulary has them, so that they get their ids.
    """
    texts = dict(zip(tokens, byte_texts(list(tokens.values())), strict=True))
    tree: _Tree = {}
    for text in texts.values():
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[_IS_TOKEN] = {}
    bytes_of_words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                bytes_of_words | {"use_regex": False},
                split | {"pattern": {"Regex": _pattern(tree)}},
            ],
        },
        "decoder": bytes_of_words | {"use_regex": True},
        "model": {
            "type": "WordLevel",
            "vocab": {text: index for index, text in {**added, **texts}.items()},
            "unk_token": "",
        },
    }


def unescape(text: str) -> bytes:
    """Return the bytes of a token in a GGUF file, which are escaped as in a literal of Python."""

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code[1:], 16)]) if len(code) == 3 else _CONTROL.get(code, code)

    return _ESCAPE.sub(replace, text.encode())


def _pattern(tree: _Tree) -> str:
    """Return the regular expression of the rest of the longest token. Branches with the most tokens come first."""
    branches = [(char, node) for char, node in tree.items() if char != _IS_TOKEN]
    if not branches:
        return ""
    ends = [re.escape(char) for char, node in branches if node.keys() == {_IS_TOKEN}]
    inner = [(char, node) for char, node in branches if node.keys() != {_IS_TOKEN}]
    inner.sort(key=lambda branch: -_count(branch[1]))
    choices = [re.escape(char) + _pattern(node) for char, node in inner]
    if ends:
        choices.append(ends[0] if len(ends) == 1 else f"[{''.join(ends)}]")
    joined = choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
    return f"(?:{joined})?" if _IS_TOKEN in tree else joined


def _count(tree: _Tree) -> int:
    return sum(1 if char == _IS_TOKEN else _count(node) for char, node in tree.items())


def _read_vocabulary(path: Path) -> dict[int, bytes]:
    """Return the tokens by their ids. A line has an id, a literal of Python and the number of bytes.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        tokens = dict(_token(line) for line in lines if line)
    except (OSError, ValueError, SyntaxError) as error:
        raise CheckpointError(path, f"not a vocabulary of RWKV: {error}") from error
    check_bytes(path, tokens.values())
    return tokens


def check_bytes(path: str | PathLike[str], tokens: Iterable[bytes]) -> None:
    """Raise CheckpointError if some byte is not a token."""
    found = {token for token in tokens if len(token) == 1}
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise CheckpointError(path, f"its vocabulary has no token for the byte {missing[0]}")


def _token(line: str) -> tuple[int, bytes]:
    index, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    token = ast.literal_eval(literal)
    data = token.encode() if isinstance(token, str) else bytes(token)
    if len(data) != int(length):
        raise ValueError(f"token {index} has {len(data)} bytes, not {length}")
    return int(index), data
