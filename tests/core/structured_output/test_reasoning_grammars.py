"""Constraints that apply only after the reasoning, with a real tokenizer."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from engine.core.structured_output.manager import StructuredOutputManager
from engine.frontend.tokenizer.converted import tokenizer_json_path
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from support.servers.server import default_model

pytestmark = pytest.mark.slow

TOKENIZER = load_tokenizer(default_model())
V = TOKENIZER.vocab_size
THINK, UNTHINK = V, V + 1
EOS = 2
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}
ANSWERS = [
    (StructuredOutput(GrammarKind.JSON_OBJECT), '{"a": [{}]}'),
    (StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(SUM)), '{"sum": 5}'),
    (StructuredOutput(GrammarKind.REGEX, r"\s*(a|b)/c"), "\n\na/c"),
    (StructuredOutput(GrammarKind.REGEX, ".*"), "anything"),
    (StructuredOutput(GrammarKind.CHOICE, '[" yes", "no"]'), " yes"),
    (
        StructuredOutput(GrammarKind.LARK, 'start: reasoning\nreasoning: "r" NUM\nNUM: /[0-9]/'),
        "r7",
    ),
    (StructuredOutput(GrammarKind.LARK, "root ::= [0-9] [a-z]"), "1a"),
    (StructuredOutput(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG)), "b <f>3</f> c"),
]
THOUGHTS = ["", 'So {"sum": <b> é\n\n', "<x </thin\n k> <think", "x\n\n"]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass
class Thinker:
    """The grammars of a model whose marks of reasoning are texts and, if `has_tokens`, also single tokens."""

    manager: StructuredOutputManager
    has_tokens: bool

    def start(self, constraint: StructuredOutput, *, is_open: bool) -> None:
        """Compile the constraint as key 0 for output that starts here."""
        tokens = ((THINK,), (UNTHINK,)) if self.has_tokens else ((), ())
        reasoning = FreeReasoning(("<think>",), ("</think>",), *tokens, is_open)
        self.manager.release(0)
        self.manager.compile(0, msgspec.structs.replace(constraint, reasoning=reasoning))
        tick = threading.Event()
        while not (events := self.manager.poll()):
            tick.wait(0.001)
        assert events == [(0, None)]

    def allowed(self) -> np.ndarray:
        """Return whether each token may come next."""
        bitmask = np.frombuffer(self.manager.fill_bitmask([0]), np.uint8)
        return np.unpackbits(bitmask, bitorder="little").astype(bool)

    def takes(self, token_ids: list[int]) -> bool:
        """Return whether the masks allow these tokens in this order."""
        return all(
            self.allowed()[token_id] and self.manager.accept_tokens(0, [token_id])
            for token_id in token_ids
        )

    def spellings(self, text: str, token_id: int) -> list[list[int]]:
        return [encode(text), *([[token_id]] if self.has_tokens else [])]


@pytest.fixture(scope="module", params=[None, False, True], ids=["texts", "added", "special"])
def thinker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Thinker]:
    path = tmp_path_factory.mktemp("thinker") / "tokenizer.json"
    tokenizer = json.loads(tokenizer_json_path(default_model()).read_text(encoding="utf-8"))
    if request.param is not None:
        tokenizer["added_tokens"] += [
            {"id": token_id, "content": text, "special": request.param, **FLAGS}
            for text, token_id in (("<think>", THINK), ("</think>", UNTHINK))
        ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    manager = StructuredOutputManager(str(path), V + 2, (EOS,))
    yield Thinker(manager, has_tokens=request.param is not None)
    manager.close()


@pytest.mark.parametrize("is_open", [True, False], ids=["opened", "not_opened"])
@pytest.mark.parametrize(("constraint", "answer"), ANSWERS)
def test_only_the_answer_after_the_reasoning_is_constrained(
    thinker: Thinker, constraint: StructuredOutput, answer: str, is_open: bool
) -> None:
    starts = thinker.spellings("<think>", THINK) + ([[]] if is_open else [])
    ends = thinker.spellings("</think>", UNTHINK)
    for start, thought, end in itertools.product(starts, THOUGHTS, ends):
        thinker.start(constraint, is_open=is_open)
        assert thinker.takes(start + encode(thought)), (start, thought)
        assert not thinker.allowed()[EOS]
        assert thinker.takes(end), (start, thought, end)
        after_end = thinker.allowed()
        assert thinker.takes([*encode(answer), EOS]), (start, thought, end)
        assert thinker.allowed().nonzero()[0].tolist() == [EOS]
    thinker.start(StructuredOutput(constraint.kind, constraint.spec), is_open=False)
    # Without reasoning, the tokens allowed are those after it, or its start.
    more = np.flatnonzero(thinker.allowed() & ~after_end).tolist()
    begun = [TOKENIZER.token_bytes(token_id) for token_id in more if token_id != THINK]
    assert all(map(b"<think>".startswith, begun))


def test_an_answer_may_start_at_once_if_no_reasoning_is_open(thinker: Thinker) -> None:
    for constraint, answer in ANSWERS:
        thinker.start(constraint, is_open=False)
        assert thinker.takes([*encode(answer), EOS]), answer
    json_schema, answer = ANSWERS[1]
    thinker.start(json_schema, is_open=False)
    assert not thinker.takes(encode("Well"))
    thinker.start(json_schema, is_open=True)
    assert thinker.takes(encode(answer)) and not thinker.takes([EOS])


def test_drafts_may_span_reasoning_and_answer(thinker: Thinker) -> None:
    json_schema, answer = ANSWERS[1]
    manager = thinker.manager
    for end in thinker.spellings("</think>", UNTHINK):
        thinker.start(json_schema, is_open=True)
        assert thinker.takes(encode("Two and three"))
        before = thinker.allowed()
        good = [*encode(" make"), *end, *encode(answer)]
        assert manager.num_acceptable(0, [*good, *encode(" more")]) == len(good)
        assert manager.forced_tokens(0, []) == []
        forced = manager.forced_tokens(0, [*encode(" make"), *end, *encode('{"')])
        assert forced and 'sum": '.startswith(TOKENIZER.decode(forced))
        manager.fill_draft_bitmasks(0, [*good, *encode(" more")])
        assert np.array_equal(thinker.allowed(), before)
        assert thinker.takes([*good, EOS])
