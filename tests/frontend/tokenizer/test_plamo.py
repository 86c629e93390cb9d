"""Tokenizers of PLaMo, which take the tokens with the largest sum of scores, from a directory and from GGUF."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.errors import CheckpointError
from gguf import GGUFWriter, TokenType

NAMED = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>"]
WORDS = {
    **{char: -9.0 - i / 64 for i, char in enumerate("abcdefghinorst \n<0x41>|:plm日本")},
    "the": -5.1,
    " the": -4.3,
    "there": -9.9,
    "re": -7.2,
    "in": -6.3,
    "ing": -14.7,
    "  ": -8.1,
    "    ": -9.6,
    "aa": -7.7,
    "aaaa": -8.3,
    "日本": -12.2,
    "é本": -30.5,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ROWS = [
    *((token, 0.0, "UNKNOWN" if i == 0 else "CONTROL") for i, token in enumerate(NAMED[:4])),
    # Published files have this token as an ordinary one.
    (NAMED[4], 0.0, "NORMAL"),
    *((token, 0.0, "BYTE") for token in BYTES),
    *((token, score, "NORMAL") for token, score in WORDS.items()),
]
IDS = {token: i for i, (token, _, _) in enumerate(ROWS)}
BREAKS = {
    "break_around_repeated_chars_threshold": 4,
    "break_around_consecutive_spaces_threshold": 3,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))


def write_directory(directory: Path, **config) -> Path:
    lines = [json.dumps([*row, 1, 2, 3], ensure_ascii=False) + "\n" for row in ROWS]
    (directory / "tokenizer.jsonl").write_text("".join(lines), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_file(directory: Path) -> Path:
    writer = GGUFWriter(path := directory / "model.gguf", "plamo3")
    writer.add_tokenizer_model("plamo2")
    writer.add_token_list([*IDS, "[PAD1]"])
    writer.add_token_scores([*(score for _, score, _ in ROWS), -1000.0])
    kinds = ["CONTROL" if token in NAMED[1:] else kind for token, _, kind in ROWS]
    writer.add_token_types([TokenType[kind] for kind in (*kinds, "UNUSED")])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def best_tokens(text: str) -> list[int]:
    """Return the tokens of a text without markers."""
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        char, paths = text[end - 1], []
        for start in range(end):
            if (word := text[start:end]) in WORDS:
                score, before = best[start]
                paths.append((score + WORDS[word], [*before, IDS[word]]))
        score, before = best[end - 1]
        paths.append((score - 1000, before + [IDS[f"<0x{byte:02X}>"] for byte in char.encode()]))
        # Of equal sums, the library takes the one with the longest last token.
        best.append(max(paths, key=lambda path: round(path[0], 6)))
    return best[-1][1]


@pytest.mark.parametrize("write", [write_directory, write_file])
def test_the_tokens_with_the_best_scores_are_taken(tmp_path: Path, write) -> None:
    tokenizer = load_tokenizer(write(tmp_path))
    rng = random.Random(0)
    parts = [*WORDS, "é", "\U0001f642", "<0x41>", "▁", "zz"]
    texts = ["", "there in", " the  the ", *("".join(rng.choices(parts, k=30)) for _ in "12345678")]
    for text in texts:
        assert list(tokenizer.encode(text)) == best_tokens(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    marked = f"a{NAMED[4]}<|plamo:no|>the"
    ids = [*best_tokens("a"), IDS[NAMED[4]], *best_tokens("<|plamo:no|>"), *best_tokens("the")]
    assert list(tokenizer.encode(marked)) == ids


def test_no_token_crosses_the_bounds_of_repeated_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, add_bos_token=True, **BREAKS))
    for text in ("in    the", "inaaaaa a", "in  the", "   the", "aaa\n\n\n\n\nb"):
        parts = re.split(r"((?:(?<!a)a{4,})| {3,})", text)
        expected = [IDS["<|plamo:bos|>"], *(i for part in parts for i in best_tokens(part))]
        assert list(tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('["a", 0, "NORMAL"]\n', "no token for the byte 0"),
        ('["a"]\n', "not a vocabulary of PLaMo"),
        ('["a", "b", "NORMAL"]\n', "not a vocabulary of PLaMo"),
        ("{}", "not a vocabulary of PLaMo"),
    ],
)
def test_damaged_vocabularies_are_named(tmp_path: Path, content: str, problem: str) -> None:
    write_directory(tmp_path)
    (tmp_path / "tokenizer.jsonl").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(tmp_path)
