"""Tokenizers of RWKV, which take the longest token, from a directory and from GGUF."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from engine.frontend.tokenizer.eos import tokenizer_eos
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.errors import CheckpointError
from gguf import GGUFWriter, TokenType

LONGER = (
    *("the", " the", " there", "\n\n", "\n\n\n", "()", "());", "\\n", "'", "^]", "a-", "a-z"),
    *("é", "日本", "日", "\U0001f642", "    ", "  ", "==", "====", "Üb", "in", "ing", " in"),
)
TOKENS = [bytes([byte]) for byte in range(256)]
TOKENS += sorted({x.encode() for x in LONGER} - set(TOKENS), key=lambda x: (len(x), x))
# Tokens need not end between characters.
TOKENS.append("日本".encode()[:4])
END = "<|rwkv_tokenizer_end_of_text|>"
CONFIG = {
    "eos_token": "\n\n",
    "bos_token": END,
    "added_tokens_decoder": {
        "0": {"content": END, "special": True},
        "65530": {"content": "\n\n", "special": True},
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))


def write_directory(directory: Path, tokens: list[bytes] = TOKENS) -> Path:
    lines = []
    for index, token in enumerate(tokens, 1):
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{index} {literal} {len(token)}\n")
    (directory / "rwkv_vocab_v20230424.txt").write_text("".join(lines), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return directory


def write_file(directory: Path) -> Path:
    writer = GGUFWriter(path := directory / "model.gguf", "rwkv7")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["<s>", *(repr(token)[2:-1] for token in TOKENS), "[PAD1]"])
    kinds = [TokenType.CONTROL, *[TokenType.NORMAL] * len(TOKENS), TokenType.UNUSED]
    writer.add_token_types(kinds)
    writer.add_chat_template("rwkv-world")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def longest_tokens(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        token = max((x for x in TOKENS if data.startswith(x)), key=len)
        ids.append(1 + TOKENS.index(token))
        data = data[len(token) :]
    return ids


@pytest.mark.parametrize("write", [write_directory, write_file])
def test_the_longest_token_is_taken_at_each_place(tmp_path: Path, write) -> None:
    tokenizer = load_tokenizer(write(tmp_path))
    rng = random.Random(0)
    parts = [*LONGER, *"abc\tz\r\n -^]\\[(.*+?{|$ß本\x00"]
    texts = [
        "",
        "the",
        "ithe there\n\n\n\n\n",
        *("".join(rng.choices(parts, k=30)) for _ in "12345"),
    ]
    for text in texts:
        assert list(tokenizer.encode(text)) == longest_tokens(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_named_end_token_has_the_id_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path))
    two_lines = 1 + TOKENS.index(b"\n\n")
    assert list(tokenizer.encode(f"the\n\n{END}in")) == [
        *longest_tokens("the\n\n"),
        0,
        *longest_tokens("in"),
    ]
    assert tokenizer_eos(tmp_path) == [two_lines, 0]


def test_a_file_may_name_the_chat_template_of_llama_cpp(tmp_path: Path) -> None:
    template = load_tokenizer(write_file(tmp_path)).chat_templates["default"]
    assert "Assistant:" in template
    assert template != "rwkv-world"


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [([b"a"], "no token for the byte 0"), (None, "not a vocabulary of RWKV")],
)
def test_damaged_vocabularies_are_named(tmp_path: Path, tokens, problem: str) -> None:
    write_directory(tmp_path, tokens or TOKENS)
    if tokens is None:
        (tmp_path / "rwkv_vocab_v20230424.txt").write_text("1 'a' 2\n")
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("entry", ["<s>", {"special": True}, {"content": 3}])
def test_damaged_added_tokens_are_named(tmp_path: Path, entry) -> None:
    write_directory(tmp_path)
    config = json.dumps({"added_tokens_decoder": {"7": entry}})
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder\.7"):
        load_tokenizer(tmp_path)
