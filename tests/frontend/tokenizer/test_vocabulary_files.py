"""Tokenizers of directories without a tokenizer.json, from the files that older classes of transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.errors import CheckpointError
from support.checkpoints.marian_files import sentencepiece_file
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

TEXT = "The quick brown fox's 12 tales, and the slow\n\ndog's 345 tails. Ünïcödé 日本 the fox "
TEXTS = [
    "",
    " the fox's",
    "The  tails\n x",
    "a<mask> b</s>",
    "Ü[MASK] 日本🙂",
    "345 <|endoftext|>dog",
]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
OPT = {f"{name}_token": "</s>" for name in ("bos", "eos", "unk")} | {"pad_token": "<pad>"}
MASK = {"content": "<mask>", "lstrip": True, "normalized": False, "special": True}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "special", "config"),
    [
        ("GPT2Tokenizer", ["<|endoftext|>"], {}),
        ("GPT2Tokenizer", ROBERTA, OPT | {"add_bos_token": True}),
        ("Qwen2Tokenizer", ["<|endoftext|>"], {"bos_token": None}),
        ("DreamTokenizer", ["<|endoftext|>"], {"bos_token": None}),
        ("RobertaTokenizer", ROBERTA, {"added_tokens_decoder": {"4": MASK}}),
        ("DebertaTokenizer", ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], {}),
        ("BertTokenizer", [], {"do_lower_case": True}),
        ("BertTokenizer", [], {"do_lower_case": False}),
        ("ElectraTokenizer", [], {"do_lower_case": True}),
    ],
)
def test_vocabularies_give_the_tokens_of_transformers(
    tmp_path: Path, name: str, special: list[str], config: dict[str, Any]
) -> None:
    if "do_lower_case" in config:
        trained = BertWordPieceTokenizer(lowercase=config["do_lower_case"])
        trained.train_from_iterator([TEXT], vocab_size=120, min_frequency=1, show_progress=False)
    else:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(
            [TEXT], vocab_size=300, min_frequency=1, special_tokens=special, show_progress=False
        )
    trained.save_model(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": name, "chat_template": "{{ messages }}"} | config)
    )
    # The class of Dream is that of Qwen2.
    kind = "Qwen2Tokenizer" if name == "DreamTokenizer" else name
    reference = getattr(transformers, kind).from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.eos_token == reference.eos_token
    assert tokenizer.chat_templates == {"default": "{{ messages }}"}


def test_intern_s1_writes_formulas_with_tokens_of_their_own(tmp_path: Path) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, min_frequency=1, show_progress=False)
    trained.save_model(str(tmp_path))
    ids = json.loads((tmp_path / "vocab.json").read_text())
    first = len(ids)
    tags = {first: "<|endoftext|>", first + 1: "<SMILES>", first + 2: "</SMILES>"}
    formulas = ["<|SMILES_=CC|>", "<|PROT_=CC|>", "<|XNA_\u2581GA|>", "<|SMILES_||>"]
    ids |= {text: first + 3 + i for i, text in enumerate(formulas)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    settings = {
        "tokenizer_class": "InternS1Tokenizer",
        "added_tokens_decoder": {str(i): {"content": text} for i, text in tags.items()},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(range(first + 1, first + 7)) == "<SMILES></SMILES>=CC=CC GA|"
    ids_of_text = tokenizer.encode(f"{TEXT} =CC<SMILES>")
    assert max(ids_of_text[:-1]) < first and ids_of_text[-1] == first + 1
    assert tokenizer.decode(ids_of_text) == f"{TEXT} =CC<SMILES>"


def test_the_tokens_of_esm_are_recognized_anywhere(tmp_path: Path) -> None:
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", "M", "K", "A", "-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    reference = transformers.EsmTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("MKAAK", "MK A-K x", "mkMKxyA z", "A<mask>K", ""):
        assert tokenizer.encode(text) == reference(text)["input_ids"], text


@pytest.mark.parametrize(
    ("name", "kind", "config", "words"),
    [
        ("spiece.model", "Albert", {}, ["▁ab", "▁ab"]),
        ("spiece.model", "Albert", {"do_lower_case": False}, ["▁", "<unk>", "b", "▁ab"]),
        ("sentencepiece.model", "RemBert", {}, ["▁", "[UNK]", "b", "▁", "[UNK]", "b"]),
    ],
)
def test_sentencepiece_models_of_albert_and_rembert_are_read(
    tmp_path: Path, name: str, kind: str, config: dict[str, Any], words: list[str]
) -> None:
    scores = dict.fromkeys(("[PAD]", "<pad>", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), 0.0)
    scores |= {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *scores]
    (tmp_path / name).write_bytes(sentencepiece_file(scores))
    config = {"tokenizer_class": f"{kind}Tokenizer"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    found = [tokens[i] for i in tokenizer.encode(" Ab  äb[MASK]")]
    assert found == ["[CLS]", *words, "[MASK]", "[SEP]"]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"legacy": True}, ["▁ab"], ["▁", "b"]),
        ({"legacy": False}, ["▁ab"], ["b"]),
        ({}, ["▁ab"], ["b"]),
        ({"add_prefix_space": False}, ["a", "b"], ["b"]),
        ({"tokenizer_class": "YiTokenizer"}, ["▁ab"], ["▁", "b"]),
    ],
)
def test_a_sentencepiece_model_is_read_with_the_tokens_beside_it(
    tmp_path: Path, settings: dict[str, Any], before: list[str], after: list[str]
) -> None:
    scores = {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *scores, "<|x|>"]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(scores, 2, removes_spaces=False))
    (tmp_path / "added_tokens.json").write_text('{"<|x|>": 8}')
    config = {"tokenizer_class": "LlamaTokenizer"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.vocab_size) == ("<s>", 2, 9)
    found = [tokens[i] for i in tokenizer.encode("ab  a<|x|>b")]
    assert found == ["<s>", *before, "▁", "▁a", "<|x|>", *after]
    # Transformers' own class puts no space before another one.
    starts = ["<s>", "▁", "▁ab"] if "tokenizer_class" in settings else ["<s>", "▁ab"]
    assert [tokens[i] for i in tokenizer.encode(" ab")] == starts


def test_a_sentencepiece_model_of_t5_gets_tokens_for_absent_parts(tmp_path: Path) -> None:
    scores = {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *scores, "<extra_id_1>", "<extra_id_0>"]
    (tmp_path / "spiece.model").write_bytes(sentencepiece_file(scores))
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 2}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    found = [tokens[i] for i in tokenizer.encode("ab  <extra_id_0> a")]
    assert found == ["▁ab", "<extra_id_0>", "▁a", "</s>"]
    assert tokenizer.special_ids >= {8, 9}


def test_a_sentencepiece_model_of_speech2text_is_read(tmp_path: Path) -> None:
    scores = {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(scores)]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece_file(scores))
    (tmp_path / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(tokens)}))
    config = {"tokenizer_class": "Speech2TextTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = [tokens.index(token) for token in ("▁ab", "▁a", "b", "</s>")]
    assert tokenizer.encode("ab ab")[0] == ids[0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab"


def test_a_sentencepiece_model_of_characters_is_read(tmp_path: Path) -> None:
    scores = dict.fromkeys(("▁", "a", "b"), -1.0)
    path = tmp_path / "spm_char.model"
    path.write_bytes(sentencepiece_file(scores, kind=4))
    added = {"6": {"content": "<mask>", "special": True}}
    config = {"tokenizer_class": "SpeechT5Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    tokens = ["<unk>", "<s>", "</s>", *scores]
    found = [tokens[i] for i in tokenizer.encode("ab b")]
    assert found == ["▁", "a", "b", "▁", "b", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab b"), skip_special_tokens=True) == "ab b"


def test_a_sentencepiece_model_of_seamless_is_read(tmp_path: Path) -> None:
    scores = {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece_file(scores))
    first = ["<pad>", "<unk>", "<s>", "</s>"]
    tokens = [*first, *scores, "__eng__", "__deu__"]
    added = {
        str(i): {"content": token, "special": True}
        for i, token in enumerate(tokens)
        if token in first or token.startswith("__")
    }
    config = {"tokenizer_class": "SeamlessM4TTokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = [tokens.index(token) for token in ("</s>", "__deu__", "▁ab", "▁a", "b", "</s>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab"
    assert tokenizer.token_to_id("__deu__") == len(tokens) - 1
    assert list(tokenizer.encode("ab")) == [tokens.index("▁ab")]


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_sentencepiece_model_of_deberta_is_read(tmp_path: Path, lowercase: bool) -> None:
    scores = dict.fromkeys(("[PAD]", "[CLS]", "[SEP]", "[UNK]"), 0.0)
    scores |= {"▁a": -1.0, "▁ab": -2.0, "b": -3.0, "▁": -4.0, "a": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *scores, "[MASK]"]
    (tmp_path / "spm.model").write_bytes(sentencepiece_file(scores))
    config = {"tokenizer_class": "DebertaV2Tokenizer", "do_lower_case": lowercase}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    found = [tokens[i] for i in tokenizer.encode(" Ab  a [MASK]")]
    words = ["▁ab"] if lowercase else ["▁", "[UNK]", "b"]
    assert found == ["[CLS]", *words, "▁a", "[MASK]", "[SEP]"]


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        (
            {"vocab.txt": "a"},
            {"tokenizer_class": "FunnelTokenizer"},
            "tokenizer_class 'FunnelTokenizer'",
        ),
        ({"vocab.json": "{}", "merges.txt": ""}, {}, "tokenizer_class ''"),
        (
            {"vocab.json": '{"a": 1}', "merges.txt": ""},
            {"tokenizer_class": "GPT2Tokenizer"},
            "not consecutive",
        ),
        ({"vocab.txt": "a"}, {"tokenizer_class": "BertTokenizer"}, "there is no token '\\[UNK\\]'"),
        (
            {"vocab.json": '{"eng": {"a": 1}}'},
            {"tokenizer_class": "Wav2Vec2CTCTokenizer"},
            "not a vocabulary of letters",
        ),
        ({"tokenizer.model": "x"}, {}, "not a model of SentencePiece"),
        (
            {"tokenizer.model": "x"},
            {"tokenizer_class": "XLNetTokenizer"},
            "tokenizer_class 'XLNetTokenizer'",
        ),
    ],
)
def test_other_files_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)
