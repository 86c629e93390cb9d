"""The search for the passage that drafts continue."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from engine.protocol.worker_messages import NewRequestData
from engine.workers.batch import PersistentBatch
from engine.workers.cpu.drafts import Drafts
from hypothesis import given
from hypothesis import strategies as st
from support.workers.worker_steps import GREEDY

pytestmark = pytest.mark.slow


MAX_MODEL_LEN = 40


def match_length(passage: list[int], end: int, tokens: list[int]) -> int:
    length = 0
    while length < min(end, len(tokens), 64) and passage[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def expected(
    tokens: list[int], most: int, shortest: int, prediction: list[int], num_prompt: int
) -> tuple[list[int], bool]:
    """Return the drafts as `sampling/draft_lookup.h` defines them, and whether they are from the prediction."""
    most = max(min(most, MAX_MODEL_LEN - 1 - len(tokens)), 0)
    num_output = len(tokens) - num_prompt

    def match_prediction(end: int) -> tuple[int, int, int]:
        is_predicted = end == num_output and prediction[:end] == tokens[num_prompt:]
        length = 64 if is_predicted else match_length(prediction, end, tokens)
        return length, -abs(end - num_output), end

    length, end = max(
        ((match_length(tokens, end, tokens), end) for end in range(1, len(tokens))),
        default=(0, 0),
    )
    nowhere = 0, 0, 0
    matches = [match_prediction(end) for end in range(1, len(prediction))]
    # If two places are equally near, use the first.
    predicted_length, _, predicted_end = max(
        matches, key=lambda match: (match[0], match[1], -match[2]), default=nowhere
    )
    if predicted_length >= max(length, shortest):
        following = prediction[predicted_end:]
        return following[: min(most, predicted_length)], bool(most)
    if length < shortest:
        return [], False
    whole = list(tokens)
    for k in range(min(most, length)):
        whole.append(whole[end + k])
    return whole[len(tokens) :], False


def new_request(slot: int, prediction: list[int]) -> NewRequestData:
    return NewRequestData(
        slot, (0, slot), b"", 0, 0, (), GREEDY, predicted_token_ids=int32_bytes(prediction)
    )


@st.composite
def rows_to_draft(draw) -> tuple[list[int], int, list[int]]:
    """Draw tokens, the prompt's length, and a prediction, which may start like the output."""
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=MAX_MODEL_LEN))
    num_prompt = draw(st.integers(0, len(tokens)))
    prediction = draw(st.lists(st.integers(0, 2), max_size=2 * MAX_MODEL_LEN))
    if draw(st.booleans()):
        prediction = tokens[num_prompt:] + prediction
    return tokens, num_prompt, prediction


@given(
    st.lists(rows_to_draft(), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(1, 4),
)
def test_drafts_follow_the_longest_match(rows, most, shortest):
    batch = PersistentBatch(len(rows), MAX_MODEL_LEN, 4, 1, torch.device("cpu"))
    drafts = Drafts(SpeculativeConfig(most, prompt_lookup_min=shortest), batch)
    for slot, (tokens, num_prompt, _) in enumerate(rows):
        batch.token_ids_NL[slot, : len(tokens)] = torch.tensor(tokens)
        batch.num_tokens[slot] = len(tokens)
        batch.num_prompt_tokens[slot] = num_prompt
    drafts.add_requests([new_request(slot, row[2]) for slot, row in enumerate(rows)])
    drafts.look_up(np.arange(len(rows), dtype=np.int32))
    all_wanted = {
        slot: expected(tokens, most, shortest, prediction, num_prompt)
        for slot, (tokens, num_prompt, prediction) in enumerate(rows)
    }
    wanted = {slot: tokens for slot, (tokens, _) in all_wanted.items() if tokens}
    assert drafts.num_from_prediction(np.arange(len(rows))).tolist() == [
        len(tokens) if is_predicted else 0 for tokens, is_predicted in all_wanted.values()
    ]
    found = drafts.get_found(7)
    if found is None:
        assert not wanted
        return
    assert found.step == 7
    assert int32_view(found.slots).tolist() == list(wanted)
    assert int32_view(found.num_tokens).tolist() == [len(tokens) for tokens in wanted.values()]
    assert int32_view(found.token_ids).tolist() == [*chain(*wanted.values())]
    for slot, tokens in wanted.items():
        start = len(rows[slot][0])
        assert batch.token_ids_NL[slot, start : start + len(tokens)].tolist() == tokens


def expected_of_suffixes(
    tokens: list[int], answers: list[list[int]], most: int, shortest: int, share: float
) -> list[int]:
    """Return the drafts according to the comments in `sampling/suffixes.h`, for a request without a source."""
    passages = []
    own = [(tokens, end) for end in range(len(tokens) - 1, shortest - 1, -1)]
    others = [
        (answer, end) for answer in reversed(answers) for end in range(len(answer) - 1, 0, -1)
    ]
    for text, end in own + others:
        length = match_length(text, end, tokens)
        if length >= shortest:
            passages.append((length, text, end))
    if not passages:
        return []
    longest = max(length for length, _, _ in passages)
    kept = [(text, end) for length, text, end in passages if length >= min(longest, 16)]
    whole, left = list(tokens), 1.0
    for k in range(max(min(most, longest, MAX_MODEL_LEN - 1 - len(tokens)), 0)):
        following = [
            whole[end + k] if text is tokens else text[end + k]
            for text, end in kept
            if text is tokens or end + k < len(text)
        ]
        if not following:
            break
        best = max(following, key=lambda token: (following.count(token), -following.index(token)))
        left *= following.count(best) / len(following)
        if left < share:
            break
        whole.append(best)
        kept = [
            (text, end)
            for text, end in kept
            if (whole[end + k] if text is tokens else [*text, -1, *[-1] * k][end + k]) == best
        ]
    return whole[len(tokens) :]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=3),
    st.integers(1, 12),
    st.integers(2, 4),
    st.sampled_from((0.1, 0.5, 1.0)),
)
def test_suffix_drafts_are_the_majority_of_the_longest_matches(
    tokens, answers, most, shortest, share
):
    batch = PersistentBatch(1, MAX_MODEL_LEN, 4, 1, torch.device("cpu"))
    config = SpeculativeConfig(
        most,
        ProposerMethod.SUFFIX,
        prompt_lookup_min=shortest,
        suffix_decoding_min_token_prob=share,
    )
    drafts = Drafts(config, batch)
    for answer in [*answers, tokens]:
        batch.token_ids_NL[0, : len(answer)] = torch.tensor(answer)
        batch.num_tokens[0] = len(answer)
        drafts.add_requests([new_request(0, [])])
        if answer is not tokens:
            drafts.remove_requests(np.zeros(1, np.int32))
    drafts.look_up(np.zeros(1, np.int32))
    found = drafts.get_found(1)
    kept = [answer for answer in answers if len(answer) > shortest]
    wanted = expected_of_suffixes(tokens, kept, most, shortest, share)
    assert ([] if found is None else int32_view(found.token_ids).tolist()) == wanted


def test_suffix_drafts_go_on_after_an_edit():
    """The request copies a text, replaces one token, and gets the text after it."""
    text = list(range(100, 118))
    batch = PersistentBatch(1, 64, 4, 1, torch.device("cpu"))
    drafts = Drafts(SpeculativeConfig(4, ProposerMethod.SUFFIX), batch)
    drafts.add_requests([new_request(0, [])])
    tokens = text + text[:8]

    def propose() -> list[int]:
        batch.token_ids_NL[0, : len(tokens)] = torch.tensor(tokens)
        batch.num_tokens[0] = len(tokens)
        drafts.look_up(np.zeros(1, np.int32))
        found = drafts.get_found(1)
        return [] if found is None else int32_view(found.token_ids).tolist()

    assert propose() == text[8:12]
    tokens.append(7)
    assert propose() == text[9:11]
    tokens += text[9:11]
    assert propose() == text[11:15]


def test_oldest_answers_make_room():
    batch = PersistentBatch(1, 64, 4, 1, torch.device("cpu"))
    config = SpeculativeConfig(4, ProposerMethod.SUFFIX, suffix_decoding_max_cached_requests=2)
    drafts = Drafts(config, batch)

    def look_up(tokens: list[int]) -> list[int]:
        batch.token_ids_NL[0, : len(tokens)] = torch.tensor(tokens)
        batch.num_tokens[0] = len(tokens)
        drafts.add_requests([new_request(0, [])])
        drafts.look_up(np.zeros(1, np.int32))
        found = drafts.get_found(1)
        return [] if found is None else int32_view(found.token_ids).tolist()

    for first in (10, 20, 30):
        look_up(list(range(first, first + 8)))
        drafts.remove_requests(np.zeros(1, np.int32))
    assert look_up([30, 31]) == [32, 33]
    assert look_up([20, 21]) == [22, 23]
    assert look_up([10, 11]) == []


def test_drafts_beyond_the_limit_of_their_level_are_dropped():
    """A longer match has a higher level of confidence, and each level has a limit of its own."""
    text = list(range(100, 124))
    rows = [text + text[:14], text + text[:2], text + text[:4]]
    batch = PersistentBatch(len(rows), 64, 4, 1, torch.device("cpu"))
    drafts = Drafts(SpeculativeConfig(16, ProposerMethod.SUFFIX), batch)
    drafts.add_requests([new_request(slot, []) for slot in range(len(rows))])
    for slot, tokens in enumerate(rows):
        batch.token_ids_NL[slot, : len(tokens)] = torch.tensor(tokens)
        batch.num_tokens[slot] = len(tokens)

    def propose(*limits: int) -> list[tuple[int, list[int], int]]:
        drafts.set_limits(np.array([(slot, *limits) for slot in range(len(rows))], np.int32))
        drafts.look_up(np.arange(len(rows), dtype=np.int32))
        found = drafts.get_found(1)
        if found is None:
            return []
        counts = int32_view(found.num_tokens)
        tokens = np.split(int32_view(found.token_ids), np.cumsum(counts)[:-1])
        levels = int32_view(found.levels)
        assert drafts.num_drafts(int32_view(found.slots)).tolist() == counts.tolist()
        return [
            (slot, each.tolist(), level)
            for slot, each, level in zip(int32_view(found.slots), tokens, levels, strict=True)
        ]

    full = [(0, text[14:24] + text[:4], 3), (1, text[2:4], 0), (2, text[4:8], 1)]
    assert propose(16, 16, 16, 16) == full
    assert propose(0, 3, 0, 10) == [(0, text[14:24], 3), (2, text[4:7], 1)]
    assert drafts.num_drafts(np.arange(3)).tolist() == [10, 0, 3]
    assert propose(0, 0, 8, 0) == []
    assert propose(0, 0, 0, 0) == []
