"""Tokenizers built from GGUF metadata, compared with independent implementations."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from engine.frontend.tokenizer.converted import tokenizer_json_path
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.errors import CheckpointError
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

pytestmark = pytest.mark.slow

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12:34 o'clock, isn't it?",
    "Numbers 12345 3.14159 １２３ ½ and  spaces   \n\n\t\ttabs \r\n ends ",
    "ünïcödé, naïve, Ελληνικά, Русский, עברית, हिन्दी, 漢字かな交じり文 한국어 ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 emoji 🏳️‍🌈 and \U0001f9d1\U0001f3fd\u200d\U0001f4bb",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # ok\n\n\nclass A:\n\tpass\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "I'LL we'VE DON'T 'tis x'y' ''",
    "a\u0301 \ufb01 \u00a0nbsp \u2028line \u200bzero \x00nul \x7f",
]


def write_gguf(path: Path, model: str, tokens, types, scores=None, merges=None, **extra) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for key, value in extra.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> tokenizers.Tokenizer:
    """Build SmolLM2's tokenizer as its authors describe it: single digits, then GPT-2's byte level."""
    fields = GGUFReader(smollm2_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == CONTROL]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokenizes_as_its_authors_describe(smollm2, smollm2_reference, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_reference.encode(text).ids
    for skip in (False, True):
        assert smollm2.decode(ids, skip) == smollm2_reference.decode(ids, skip_special_tokens=skip)


@examples(200)
@given(text=st.text() | st.text(alphabet=" \n\t0123a'éß漢👍", max_size=60))
def test_smollm2_decodes_what_it_encodes(smollm2: Tokenizer, smollm2_reference, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_reference.encode(text).ids
    assert smollm2.decode(ids) == smollm2_reference.decode(ids, skip_special_tokens=False)
    # This vocabulary has no token for some bytes of control and unassigned characters.
    if all(char.isprintable() or char in "\n\t" for char in text):
        assert smollm2.decode(ids) == text


@examples(200)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_ids_decode_as_with_the_reference(smollm2, smollm2_reference, ids, skip) -> None:
    expected = smollm2_reference.decode(ids, skip_special_tokens=skip)
    assert smollm2.decode(ids, skip) == expected


def test_smollm2_names_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.eos_token, smollm2.eos_token_id) == ("<|im_end|>", 2)
    assert (smollm2.pad_token, smollm2.pad_token_id) == ("<|im_end|>", 2)
    assert {0, 1, 2} < smollm2.special_ids
    assert smollm2.id_to_token(1) == "<|im_start|>"
    assert smollm2.token_bytes(1) == b"<|im_start|>"
    assert smollm2.id_to_token(49152) is None
    assert smollm2.token_bytes(49152) == b""
    assert "<|im_start|>" in smollm2.chat_templates["default"]


def test_token_bytes_of_a_split_character_are_its_parts(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👍")
    assert len(ids) > 1
    assert b"".join(map(smollm2.token_bytes, ids)) == "👍".encode()


def sentencepiece_vocabulary(pieces: list[str], specials: dict[str, int] | None = None):
    """Return tokens, types and scores: <unk> <s> </s>, specials, 256 byte tokens, then `pieces`, best first."""
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | (specials or {})
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*head, *bytes_, *pieces]
    types = [*head.values(), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * (len(head) + 256) + [-float(i) for i in range(len(pieces))]
    return tokens, types, scores


def score_greedy(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Encode `text` by SentencePiece's BPE as its paper describes it.

    The adjacent pair with the best score is joined, the leftmost first, until no pair is a token. Characters that are
    not tokens become bytes.
    """
    rank = {token: (score, i) for i, (token, score) in enumerate(zip(tokens, scores, strict=True))}
    symbols = list(text)
    while True:
        pairs = [
            (-rank[left + right][0], at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in rank
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        if symbol in rank:
            ids.append(rank[symbol][1])
        else:
            ids += [rank[f"<0x{byte:02X}>"][1] for byte in symbol.encode()]
    return ids


def trained_pieces(texts: list[str], size: int) -> list[str]:
    """Return pieces in the order in which BPE training found them, then single characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
    tokenizer.train_from_iterator([t.replace(" ", "▁") for t in texts], trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [token for token, _ in vocab if len(token) > 1]
    return merged + [token for token, _ in vocab if len(token) == 1 and token != " "]


CORPUS = [
    "the cat sat on the mat and the hat",
    "a banana bandana, ban an ana",
    "aaaa aaaaaaa   bbbb abab ababab cabcab",
    "she sells sea shells by the sea shore",
    "    indented\n        twice\n\n\n",
    "élan, déjà vu, naïveté",
]
PIECES = trained_pieces(CORPUS * 3, 180)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def sentencepiece(request, tmp_path_factory) -> tuple[Tokenizer, list[str], list[float], bool]:
    tokens, types, scores = sentencepiece_vocabulary(PIECES, {"<|user|>": USER_DEFINED})
    path = write_gguf(
        tmp_path_factory.mktemp("spm") / "model.gguf",
        "llama",
        tokens,
        types,
        scores,
        add_space_prefix=request.param,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    return load_tokenizer(path), tokens, scores, request.param


@examples(400)
@given(text=st.text(alphabet="abcnt heslé▁漢\n", max_size=40) | st.sampled_from(CORPUS))
def test_sentencepiece_merges_by_score(sentencepiece, text: str) -> None:
    tokenizer, tokens, scores, prefix = sentencepiece
    normalized = text.replace(" ", "▁")
    if prefix and text:
        normalized = "▁" + normalized
    assert tokenizer.encode(text) == [1, *score_greedy(normalized, tokens, scores)]
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)[1:]


@examples(200)
@given(text=st.text(st.characters(exclude_characters="▁<", exclude_categories=["Cs"])))
def test_sentencepiece_decodes_what_it_encodes(sentencepiece, text: str) -> None:
    tokenizer, *_ = sentencepiece
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_tokens_have_their_bytes(sentencepiece) -> None:
    tokenizer, tokens, _, _ = sentencepiece
    assert tokenizer.token_bytes(tokens.index("<0xE6>")) == b"\xe6"
    assert tokenizer.token_bytes(tokens.index("▁the")) == b" the"
    assert tokenizer.token_bytes(1) == b"<s>"


def test_token_types_decide_which_tokens_are_special(sentencepiece) -> None:
    tokenizer, tokens, *_ = sentencepiece
    user = tokens.index("<|user|>")
    assert user in tokenizer.encode("the<|user|>cat")
    assert user not in tokenizer.special_ids
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, user, 2], skip_special_tokens=True) == "<|user|>"
    assert tokenizer.decode([1, user, 2]) == "<s><|user|></s>"


def test_literal_byte_token_in_a_text_is_text(sentencepiece) -> None:
    tokenizer, tokens, *_ = sentencepiece
    assert tokens.index("<0x41>") not in tokenizer.encode("<0x41>")


def test_user_defined_runs_of_spaces_are_single_tokens(tmp_path: Path) -> None:
    """Gemma's files contain runs of spaces and newlines as user-defined tokens, and add no prefix."""
    pieces = [piece for piece in PIECES if piece != "\n\n"]
    tokens, types, scores = sentencepiece_vocabulary(
        pieces, {"  ": USER_DEFINED, "    ": USER_DEFINED, "\n\n": USER_DEFINED}
    )
    path = write_gguf(
        tmp_path / "g.gguf", "llama", tokens, types, scores, add_space_prefix=False, bos_token_id=1
    )
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("the    cat\n\n  ", add_special_tokens=False)
    assert tokens.index("    ") in ids
    assert ids[-2:] == [tokens.index("\n\n"), tokens.index("  ")]
    assert tokenizer.decode(ids) == "the    cat\n\n  "


@pytest.mark.parametrize(
    ("model", "extra"),
    [("gemma4", {}), ("gpt2", {"pre": "sarvam-moe", "add_bos_token": True})],
    ids=["gemma4", "sarvam-moe"],
)
def test_gemma4_merges_in_the_order_of_its_list(tmp_path: Path, model: str, extra) -> None:
    pieces = ["a", "b", "c", "▁", "ab", "bc", "▁a", "\n", "\n\n"]
    tokens, types, scores = sentencepiece_vocabulary(pieces)
    merges = ["b c", "a b", "▁ a", "\n \n"]
    extra = {"bos_token_id": 1, **extra}
    path = write_gguf(tmp_path / "g.gguf", model, tokens, types, scores, merges, **extra)
    tokenizer = load_tokenizer(path)
    text = "abc ab\n\né"
    ids = tokenizer.encode(text)
    expected = ["<s>", "a", "bc", "▁", "ab", "\n\n", "<0xC3>", "<0xA9>"]
    assert [tokens[i] for i in ids] == expected
    assert tokenizer.decode(ids[1:]) == text


def test_unigram_finds_the_segmentation_with_the_best_score(tmp_path: Path) -> None:
    """The expected segmentation is found by trying all of them."""
    pieces = {"▁": -2.0, "a": -3.0, "b": -3.5, "ab": -4.0, "▁a": -3.6, "ba": -4.1, "bab": -5.0}
    tokens = ["<pad>", "</s>", "<unk>", *pieces]
    path = write_gguf(
        tmp_path / "u.gguf",
        "t5",
        tokens,
        [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(pieces)],
        [0.0, 0.0, 0.0, *pieces.values()],
        eos_token_id=1,
        unknown_token_id=2,
    )
    tokenizer = load_tokenizer(path)

    def segmentations(text: str):
        if not text:
            yield 0.0, []
        for piece, score in pieces.items():
            if text.startswith(piece):
                for rest, others in segmentations(text[len(piece) :]):
                    yield score + rest, [piece, *others]

    for text in ("ab", "abab", "aabba", "babbab"):
        _, best = max(segmentations("▁" + text))
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text)] == [*best, "</s>"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def byte_level_file(path: Path, **extra) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "hell", "hello", "12", "<|end|>"]
    types = [*[NORMAL] * (len(tokens) - 1), CONTROL]
    return write_gguf(path, "gpt2", tokens, types, merges=["h e", "l l", "he ll", "1 2"], **extra)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "12345 don't", ["123", "45", " don", "'t"]),
        ("qwen2", "12345 don't", ["1", "2", "3", "4", "5", " don", "'t"]),
        ("gpt-2", "12345 don't", ["12345", " don", "'t"]),
        ("jina-v2-code", "12345 don't", ["12345", " don", "'t"]),
        ("smollm", "a12 b", ["a", "1", "2", " b"]),
        ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", " don't", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("deepseek-v3", "漢字12ab", ["漢字", "12", "ab"]),
        (
            "kimi-k2",
            "漢字abかな漢 HelloWorld's 1234!\n\n x",
            [
                "漢字",
                "abかな",
                "漢",
                " Hello",
                "World's",
                " ",
                "123",
                "4",
                "!\n\n",
                " x",
            ],
        ),
        ("deepseek-coder", "x12\ny", ["x", "1", "2", "\n", "y"]),
        ("falcon", "a<b12345", ["a", "<", "b", "123", "45"]),
        ("default", "a=b 12345", ["a", "=", "b", " ", "123", "45"]),
        ("llama-bpe", "x \n\n  y", ["x", " \n\n", " ", " y"]),
        ("hy_v4", "漢字1234ab", ["漢字", "123", "4", "ab"]),
        ("afmoe", "a12345b 漢か1234567", ["a", "12", "345", "b", " ", "漢か", "1", "234", "567"]),
        ("spark2_5", "a!\n\n漢12 b", ["a", "!", "\n", "\n", "漢", "1", "2", " b"]),
        ("laguna", "a \n\n b12", ["a", " ", "\n\n", " b", "1", "2"]),
        ("exaone-moe", "old words 12!\n\n", ["old words", " ", "1", "2", "!\n", "\n"]),
        ("k2-horizon", "a\u0301\u200db 1234", ["a\u0301\u200db", " ", "123", "4"]),
        ("jais-2", "a     b", ["a", "    ", " b"]),
        ("youtu", "漢か，。한국HelloWorld12", ["漢か", "，。", "한국", "Hello", "World", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_words_as_expected(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    path = byte_level_file(tmp_path / "b.gguf", pre=pre, bos_token_id=5)
    built = json.loads(tokenizer_json_path(path).read_bytes())
    splitter = tokenizers.Tokenizer(models.BPE())
    built["model"] = json.loads(splitter.to_str())["model"]
    built["post_processor"] = None
    words = tokenizers.Tokenizer.from_str(json.dumps(built)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in words] == pieces


def test_qwen_normalizes_characters_to_nfc(tmp_path: Path) -> None:
    composing = load_tokenizer(byte_level_file(tmp_path / "a.gguf", pre="qwen2"))
    assert composing.encode("e\u0301") == composing.encode("\u00e9")
    assert composing.decode(composing.encode("he\u0301<|end|>")) == "h\u00e9<|end|>"
    others = load_tokenizer(byte_level_file(tmp_path / "b.gguf", pre="llama-bpe", bos_token_id=5))
    assert others.encode("e\u0301") != others.encode("\u00e9")


def test_llama3_encodes_known_words_without_merges(tmp_path: Path) -> None:
    ignoring = load_tokenizer(byte_level_file(tmp_path / "a.gguf", pre="llama-bpe", bos_token_id=5))
    merging = load_tokenizer(byte_level_file(tmp_path / "b.gguf", pre="gpt-2"))
    hello = ignoring.token_to_id("hello")
    assert ignoring.encode("hello") == [5, hello]
    assert [merging.id_to_token(i) for i in merging.encode("hello")] == ["hell", "o"]


def test_every_known_pre_tokenizer_compiles_and_keeps_the_text(tmp_path: Path) -> None:
    from engine.frontend.tokenizer.conversion.pretokenizers import PRE_TOKENIZERS

    text = "".join(TEXTS[:4] + TEXTS[5:7]) + TEXTS[4]
    for name in PRE_TOKENIZERS:
        path = byte_level_file(tmp_path / f"{name}.gguf", pre=name, bos_token_id=5)
        tokenizer = load_tokenizer(path)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text, name


def test_missing_pre_tokenizer_uses_the_default_with_a_warning(tmp_path: Path, caplog) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "m.gguf"))
    assert tokenizer.decode(tokenizer.encode("a=12")) == "a=12"
    assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize(
    ("model", "extra", "problem"),
    [
        ("gpt2", {"pre": "nonesuch"}, "tokenizer.ggml.pre 'nonesuch' is not supported"),
        (
            "nonesuch",
            {},
            "the type 'nonesuch'; supported types are bert, gemma4, gpt2, llama, plamo2, rwkv and t5",
        ),
        ("gpt2", {"pre": "gpt-2", "add_bos_token": True}, "does not say which"),
        ("llama", {}, "no tokenizer.ggml.scores"),
    ],
)
def test_unsupported_tokenizers_are_named(tmp_path: Path, model: str, extra, problem: str) -> None:
    merges = ["a b"] if model == "gpt2" else None
    path = write_gguf(
        tmp_path / "x.gguf", model, ["a", "b", "ab"], [NORMAL] * 3, merges=merges, **extra
    )
    with pytest.raises(CheckpointError, match=problem) as error:
        load_tokenizer(path)
    assert "x.gguf" in str(error.value)


def test_conversion_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "c.gguf", pre="gpt-2")
    first = tokenizer_json_path(path)
    written = first.stat().st_mtime_ns
    assert tokenizer_json_path(path) == first
    assert first.stat().st_mtime_ns == written
    byte_level_file(path, pre="qwen2")
    assert tokenizer_json_path(path) != first


def test_a_damaged_cached_conversion_is_replaced(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "c.gguf", pre="gpt-2")
    directory = tokenizer_json_path(path).parent
    whole = (directory / "tokenizer.json").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", None):
        if damaged is None:
            (directory / "tokenizer.json").unlink()
        else:
            (directory / "tokenizer.json").write_bytes(damaged)
        assert tokenizer_json_path(path).read_bytes() == whole


def test_unwritable_cache_names_the_remedy(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set ENGINE_CACHE to a writable directory"):
        load_tokenizer(byte_level_file(tmp_path / "d.gguf", pre="gpt-2"))


def test_phi3_markers_remove_following_whitespace(tmp_path: Path) -> None:
    tokens, types, scores = sentencepiece_vocabulary(PIECES, {"<|end|>": CONTROL})
    writer = GGUFWriter(tmp_path / "p.gguf", "phi3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(np.asarray(scores, np.float32).tolist())
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "p.gguf")
    assert tokenizer.encode("<|end|>\n ") == [tokens.index("<|end|>")]


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([NORMAL] * 3)
    writer.add_token_merges(["a b"])
    writer.add_chat_template(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "t.gguf")
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
