"""Long texts get the same tokens from another process, also after that process was killed."""

from __future__ import annotations

import pytest
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.long_texts import LONG_TEXT
from support.processes import running_children
from support.server import default_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("unit", ["ab c\n", "привет, ", "😀 <|im_end|> "])
def test_long_texts_have_the_tokens_of_the_library(unit: str) -> None:
    text = unit * (LONG_TEXT // len(unit) + 1)
    here, moved = load_tokenizer(default_model()), load_tokenizer(default_model())
    moved.move_long_texts()
    literal = here.literal_encoder().encode(text, False)
    for _ in range(2):
        assert list(moved.encode(text)) == here.encode(text)
        assert list(moved.literal_encoder().encode(text, False)) == literal
        for child in running_children():
            if "long texts" in " ".join(child.cmdline()):
                child.kill()
