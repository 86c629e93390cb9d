"""Long texts get the tokens of the library from another process and in pieces; texts without tokens are refused."""

from __future__ import annotations

import pytest
import tokenizers
from engine.frontend.tokenizer import long_texts
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.long_texts import LONG_TEXT
from engine.frontend.tokenizer.text_pieces import PIECE, encode_text
from engine.protocol.errors import ParameterError
from support.processes.waiting import running_children
from support.servers.server import default_model

pytestmark = pytest.mark.slow


def library_tokens(text: str, *, special_is_text: bool) -> list[int]:
    """Return the tokens of a text that the library encodes as a whole."""
    backend = tokenizers.Tokenizer.from_file(str(load_tokenizer(default_model()).path))
    backend.encode_special_tokens = special_is_text
    token_ids: list[int] = backend.encode(text, add_special_tokens=not special_is_text).ids
    return token_ids


@pytest.mark.parametrize(
    "unit",
    ["ab c\n", "привет, ", "😀 <|im_end|> ", "a", "don't 12345.6   \n\n日本語テキスト,\t<|im_"],
)
def test_long_texts_have_the_tokens_of_the_library(unit: str) -> None:
    text = unit * (LONG_TEXT // len(unit) + 1)
    moved = load_tokenizer(default_model())
    moved.move_long_texts()
    whole = library_tokens(text, special_is_text=False)
    literal = library_tokens(text, special_is_text=True)
    for _ in range(2):
        assert list(moved.encode(text)) == whole
        assert list(moved.literal_encoder().encode(text, False)) == literal
        for child in running_children():
            if "long texts" in " ".join(child.cmdline()):
                for process in (*child.children(), child):
                    process.kill()


def test_a_text_that_takes_too_long_is_refused_and_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved, text = load_tokenizer(default_model()), "ab c\n" * LONG_TEXT
    moved.move_long_texts()
    with monkeypatch.context() as patch:
        patch.setattr(long_texts, "MAX_WALL_S", 0.02)
        patch.setattr(long_texts, "WALL_S_PER_MIB", 0.0)
        with pytest.raises(ParameterError, match=r"^prompt takes more than 0 s to be tokenized"):
            moved.encode(text)
    [fork_server] = [c for c in running_children() if "long texts" in " ".join(c.cmdline())]
    assert not fork_server.children()
    short = text[: LONG_TEXT + 1]
    assert list(moved.encode(short)) == library_tokens(short, special_is_text=False)


class CountingTokenizer:
    """A tokenizer of the library that records the longest text that it encodes at once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.longest = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
        self.longest = max(self.longest, *map(len, texts))
        return self._backend.encode_batch(texts, **options)


def test_special_tokens_surround_the_pieces_of_a_text() -> None:
    backend = tokenizers.Tokenizer.from_file(str(load_tokenizer(default_model()).path))
    special = [(name, backend.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=special
    )
    text = "".join(f"word {i}, it's {i * i}.\n" for i in range(PIECE // 8))
    counting = CountingTokenizer(backend)
    encoded = encode_text(counting, text, add_special_tokens=True)  # type: ignore[arg-type]
    assert list(encoded.token_ids) == backend.encode(text).ids
    assert (encoded.num_before, encoded.num_after) == (1, 1)
    assert counting.longest == PIECE < len(text)


def test_text_that_a_vocabulary_lacks_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    for text in ("b", "b" * (PIECE + 1)):
        with pytest.raises(ParameterError, match=r"^prompt cannot be tokenized: WordLevel"):
            encode_text(backend, text, add_special_tokens=True)
