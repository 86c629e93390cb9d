"""Tokenizers of Marian models, whose sources and answers have different SentencePiece models."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.errors import CheckpointError
from support.checkpoints.marian_files import sentencepiece_file, write_marian_tokenizer

SOURCE = {
    "▁": -3.0,
    "▁the": -1.0,
    "▁th": -2.0,
    "e": -2.5,
    "s": -2.5,
    "es": -4.0,
    "t": -4.0,
    "h": -5.0,
}
TARGET = {"▁": -3.0, "▁d": -1.0, "i": -2.0, "e": -2.0, "ie": -2.5, "ü": -4.0, "s": -3.0}
TOKENS = ["</s>", "<unk>", *sorted({*SOURCE, *TARGET}, reverse=True), ">>deu<<", "<pad>"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model"
    path.mkdir()
    write_marian_tokenizer(path, SOURCE, TARGET, TOKENS)
    return path


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [TOKENS[i] for i in tokenizer.encode(text)]


def test_sources_are_split_by_the_first_model_and_answers_by_the_second(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    # Spaces at the ends and repeated ones are removed.
    assert pieces(tokenizer, "  these  the ") == ["▁the", "s", "e", "▁the", "</s>"]
    assert pieces(tokenizer, ">>deu<< thee") == [">>deu<<", "▁the", "e", "</s>"]
    # A character of the other language has a token; the others together have one.
    assert pieces(tokenizer, "eü??e") == ["▁", "e", "ü", "<unk>", "e", "</s>"]
    assert [TOKENS[i] for i in tokenizer.encode_output("die diüs")] == [
        *("▁d", "ie", "▁d", "i", "ü", "s")
    ]
    ids = [TOKENS.index(token) for token in ("▁d", "ie", "▁the", "e", "</s>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "die thee"
    assert tokenizer.eos_token_id == 0 and tokenizer.pad_token_id == len(TOKENS) - 1


def test_sources_and_answers_may_have_vocabularies_of_their_own(directory: Path) -> None:
    target = ["<pad>", "</s>", "<unk>", *TARGET]
    write_marian_tokenizer(directory, SOURCE, TARGET, TOKENS, target)
    tokenizer = load_tokenizer(directory)
    assert pieces(tokenizer, "these") == ["▁the", "s", "e", "</s>"]
    assert [target[i] for i in tokenizer.encode_output("die")] == ["▁d", "ie"]
    assert tokenizer.decode([target.index("▁d"), target.index("ie"), 1], True) == "die"
    assert tokenizer.vocab_size == len(target)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("source.spm", sentencepiece_file(SOURCE, kind=2), "not a unigram model"),
        ("target.spm", b"", "not a unigram, BPE or character model"),
        ("target.spm", sentencepiece_file(TARGET)[:-40], "not a model of SentencePiece"),
        ("source.spm", b"\x0a\x05abc", "not a model of SentencePiece"),
        ("vocab.json", b'{"a": 0}', "there is no token '</s>'"),
        ("vocab.json", b'{"a": 0, "b": 2}', "not consecutive"),
        ("vocab.json", b"[1]", "not a vocabulary"),
    ],
)
def test_damaged_files_are_named(directory: Path, name: str, content: bytes, words: str) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as error:
        load_tokenizer(directory)
    assert name in str(error.value)


def test_changed_files_are_converted_again(directory: Path) -> None:
    assert load_tokenizer(directory).encode("the")
    (directory / "source.spm").write_bytes(sentencepiece_file(SOURCE | {"▁the": -90.0}))
    assert pieces(load_tokenizer(directory), "the") == ["▁th", "e", "</s>"]
