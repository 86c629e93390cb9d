"""Log-probabilities at /v1/completions. The core of these tests repeats each prompt over and over."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import openai
import pytest
from engine.frontend.api.logprobs import CompletionLogprobs, LogprobsRenderer
from engine.frontend.client.logprobs import PositionLogprobs
from engine.frontend.http.json_pieces import encode_whole
from support.servers.engine_fixtures import smollm2_tokenizer
from support.servers.frontend_process import MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

PROMPT = "One two three four five"


def test_completion_logprobs_match_the_tokens(
    client: openai.OpenAI, frontend: FrontendProcess
) -> None:
    answer = client.completions.create(model=MODEL, prompt="é 😀!", max_tokens=6, logprobs=2)
    [choice] = answer.choices
    logprobs = choice.logprobs
    ids = frontend.tokenizer.encode("é 😀!")
    expected = [-token / 1000 for token in (ids * 6)[:6]]
    assert logprobs.token_logprobs == pytest.approx(expected)
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == 6
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value and len(top) == 3, "two alternatives and the token itself"
    starts = [choice.text[offset:] for offset in logprobs.text_offset]
    assert logprobs.text_offset[0] == 0 and starts[-1].startswith(("é", "!", " "))


def test_partial_characters_in_logprobs_are_shown_as_bytes(frontend: FrontendProcess) -> None:
    for echo in (False, True):
        answer = frontend.complete("😀", max_tokens=3, logprobs=0, echo=echo)
        logprobs = answer["choices"][0]["logprobs"]
        pieces = [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
        assert logprobs["tokens"] == pieces * (2 if echo else 1)
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert top is None or list(top) == [token]


def test_readable_part_of_a_partial_character_token_is_shown_as_text(
    frontend: FrontendProcess,
) -> None:
    answer = frontend.complete(" 😀", max_tokens=1, logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"] == [r"bytes: \xf0\x9f\x98"]


def test_tokens_with_equal_text_keep_their_own_logprobs() -> None:
    tokenizer = smollm2_tokenizer()
    high, middle, low = tokenizer.encode("😀")
    logprobs = CompletionLogprobs(LogprobsRenderer(tokenizer), tokenizer, skip_special=True)

    def top(token_id: int, logprob: float, candidates: list[tuple[int, float]]) -> dict:
        position = PositionLogprobs(token_id, logprob, 3, candidates)
        rendered = msgspec.json.decode(encode_whole(logprobs.piece([token_id], [position])))
        [found] = rendered["top_logprobs"]
        return found

    expected = {r"bytes:\xf0\x9f": -0.5, r"bytes:\x98": -1.0, r"bytes:\x80": -9.0}
    assert top(low, -9.0, [(high, -0.5), (middle, -1.0)]) == expected
    # Some vocabularies have a text twice, as a piece and as a byte.
    assert list(top(low, -9.0, [(low, -0.5)]).values()) == [-0.5]


def test_text_offsets_point_into_the_text(frontend: FrontendProcess) -> None:
    [choice] = frontend.complete(PROMPT, max_tokens=9, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("as_text", [True, False])
def test_text_offsets_include_special_tokens_of_an_echoed_prompt(
    frontend: FrontendProcess, as_text: bool
) -> None:
    prompt = f"{frontend.tokenizer.eos_token}{PROMPT}"
    given = prompt if as_text else frontend.tokenizer.encode(prompt)
    options = {"max_tokens": 9, "ignore_eos": True, "logprobs": 0, "echo": True}
    [choice] = frontend.complete(given, **options)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        is_shown = token != frontend.tokenizer.eos_token or offset == 0
        assert choice["text"][offset:].startswith(token) == is_shown


def test_streamed_logprobs_equal_those_of_the_whole_answer(frontend: FrontendProcess) -> None:
    whole = frontend.complete(PROMPT, max_tokens=9, logprobs=1, echo=True)["choices"][0]
    streamed = frontend.post(
        "/v1/completions", prompt=PROMPT, max_tokens=9, logprobs=1, echo=True, stream=True
    )
    joined = defaultdict(list)
    text = ""
    for event in sse_events(streamed.text):
        text += event["choices"][0]["text"]
        for name, values in event["choices"][0]["logprobs"].items():
            joined[name] += values
    assert text == whole["text"] and joined == whole["logprobs"]


def test_echo_without_generation_scores_the_prompt(frontend: FrontendProcess) -> None:
    answer = frontend.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT
    ids = frontend.tokenizer.encode(PROMPT)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(pytest.approx(-i / 1000) for i in ids[1:])]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_of_token_ids_is_their_text(frontend: FrontendProcess) -> None:
    ids = [frontend.tokenizer.eos_token_id, *frontend.tokenizer.encode("a b")]
    [choice] = frontend.complete(ids, echo=True, max_tokens=3, ignore_eos=True)["choices"]
    assert choice["text"] == f"{frontend.tokenizer.eos_token}a b" + "a b"


def test_prompt_logprobs_are_returned(frontend: FrontendProcess) -> None:
    [choice] = frontend.complete(PROMPT, prompt_logprobs=1, max_tokens=1)["choices"]
    ids = frontend.tokenizer.encode(PROMPT)
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for token, position in zip(ids[1:], rest, strict=True):
        assert position[str(token)]["logprob"] == pytest.approx(-token / 1000)
        assert position[str(token)]["rank"] == token
        assert position["0"]["rank"] == 1
