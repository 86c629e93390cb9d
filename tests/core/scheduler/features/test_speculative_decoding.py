"""Drafts and their verification. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.protocol.arrays import float32_bytes, int32_bytes, int32_view
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from engine.protocol.errors import EngineError
from engine.protocol.messages import FinishReason, SpecDecodingStats
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from engine.protocol.worker_messages import DraftTokenIds, ModelRunnerOutput, RowLogprobs
from support.scheduler.fingerprints import extend
from support.scheduler.harness import Harness
from support.scheduler.model_grammar import allowed_tokens
from support.scheduler.model_worker import Row, choose_token, propose_prediction
from support.scheduler.recorded_harness import RecordedHarness, replay

VOCAB_SIZE = 512


def foresee(row: Row, count: int) -> list[int]:
    """Return the tokens that the model will generate."""
    fingerprint, tokens = row.fingerprints[-1], []
    for _ in range(count):
        tokens.append(choose_token(fingerprint, VOCAB_SIZE))
        fingerprint = extend(fingerprint, tokens[-1])
    return tokens


def foresee_constrained(row: Row, count: int) -> list[int]:
    """Return the tokens that the model will generate under the grammar."""
    fingerprint, tokens = row.fingerprints[-1], []
    num_output = len(row.token_ids) - row.num_prompt_tokens
    for position in range(num_output, num_output + count):
        allowed = allowed_tokens(position, VOCAB_SIZE)
        tokens.append(choose_token(fingerprint, VOCAB_SIZE, allowed))
        fingerprint = extend(fingerprint, tokens[-1])
    return tokens


def right(count: int, num_right: int | None = None):
    """Propose `count` drafts. Only the first `num_right` are correct."""

    def propose(row: Row) -> list[int]:
        tokens = foresee(row, count)
        for index in range(count if num_right is None else num_right, count):
            tokens[index] = (tokens[index] + 1) % VOCAB_SIZE
        return tokens

    return propose


def speculating(num_drafts: int, propose=None, **limits: object) -> Harness:
    """Return a harness whose drafts come with the outputs, one step at a time."""
    defaults = {"async_scheduling": False, "max_in_flight": 1}
    return Harness(
        vocab_size=VOCAB_SIZE,
        speculative=SpeculativeConfig(num_drafts),
        propose=propose or right(num_drafts),
        **{**defaults, **limits},
    )


def total(harness: Harness) -> SpecDecodingStats:
    summed = SpecDecodingStats()
    for stats in filter(None, (stats.spec_decoding for stats in harness.stats)):
        summed.num_drafts += stats.num_drafts
        summed.num_draft_tokens += stats.num_draft_tokens
        summed.num_accepted_tokens += stats.num_accepted_tokens
    return summed


def test_5_1_accepted_drafts_save_steps():
    harness = speculating(3)
    key = harness.add(6, 9)
    harness.drain()
    # One token by the prompt, then four a step.
    assert len(harness.received[key].token_ids) == 9
    assert len([step for step in harness.steps if step.slots != b""]) == 3
    assert total(harness).num_draft_tokens == total(harness).num_accepted_tokens == 6


def test_5_1_rejected_drafts_are_subtracted_when_the_output_arrives():
    harness = speculating(3, right(3, num_right=1))
    harness.add(6, 30)
    harness.step()
    state = harness.scheduler.slots
    step = harness.schedule()
    assert int32_view(step.drafts).tolist() == [0, 3]
    assert int32_view(step.chunks).tolist() == [0, 4]
    assert len(int32_view(step.draft_token_ids)) == 3
    assert (state.num_computed_tokens[0], state.num_expected_tokens[0]) == (10, 11)
    harness.update()
    assert (state.num_computed_tokens[0], state.num_expected_tokens[0]) == (8, 9)
    harness.drain()


def test_5_1_drafts_are_trimmed_to_the_budget_and_the_length():
    harness = speculating(4, max_num_batched_tokens=8)
    harness.add([1] * 3, 20)
    harness.add([2] * 3, 20)
    harness.step()
    harness.schedule()
    assert harness.batch == {0: 5, 1: 3}
    harness.update()
    harness.drain()
    short = speculating(4)
    short.add(5, 3)
    short.step()
    short.schedule()
    # One token is known, and only one more may be drafted, because the third token is the last.
    assert short.batch == {0: 2}
    short.drain()


def test_5_1_drafts_leave_a_prompt_its_share_of_the_step():
    harness = speculating(4, max_num_batched_tokens=8)
    harness.add([1] * 3, 20)
    harness.step()
    harness.add([2] * 30, 2)
    harness.step()
    harness.schedule()
    assert harness.batch == {0: 1, 1: 7}
    harness.update()
    harness.drain()


def test_5_1_a_request_whose_drafts_do_not_fit_into_the_budget_still_samples():
    harness = speculating(4, max_num_batched_tokens=2)
    keys = [harness.add([n + 1], 6) for n in range(2)]
    harness.drain()
    assert all(harness.received[key].reason is FinishReason.LENGTH for key in keys)


def test_5_1_drafts_may_arrive_separately_from_the_output():
    harness = speculating(2, lambda row: [])
    harness.add(5, 20)
    harness.step()
    scheduler = harness.scheduler
    drafts = int32_bytes(foresee(harness.worker.rows[0], 2))
    one, two = int32_bytes([1]), int32_bytes([2])
    scheduler.update_draft_token_ids(DraftTokenIds(1, int32_bytes([0]), two, drafts))
    step = harness.schedule()
    assert step.draft_token_ids == drafts
    # Drafts from a step before the last one are ignored, and so are drafts of a finished request.
    scheduler.update_draft_token_ids(DraftTokenIds(0, int32_bytes([0]), one, int32_bytes([7])))
    harness.update()
    scheduler.update_draft_token_ids(DraftTokenIds(1, int32_bytes([0]), one, int32_bytes([7])))
    assert harness.schedule().drafts == b""
    harness.update()
    harness.abort((0, 0))
    scheduler.update_draft_token_ids(DraftTokenIds(3, int32_bytes([0]), one, int32_bytes([7])))
    harness.add(5, 4)
    harness.step()
    assert harness.steps[-1].drafts == b""
    harness.drain()


def test_5_1_accepted_drafts_after_a_stop_are_dropped():
    probe = Harness(vocab_size=VOCAB_SIZE)
    probe.add(5, 9)
    probe.drain()
    tokens = probe.received[0, 0].token_ids
    harness = speculating(4)
    key = harness.add(5, 9, stop_token_ids=(tokens[2],))
    later = harness.add(5, 9, eos=(tokens[0], tokens[3]), min_tokens=2)
    harness.drain()
    assert harness.received[key].token_ids == tokens[:3]
    assert harness.received[key].finished.stop_reason == tokens[2]
    assert harness.received[later].token_ids == tokens[:4]


def test_5_1_logprobs_are_truncated_with_the_tokens():
    harness = speculating(3, lambda row: [])
    scheduler = harness.scheduler
    harness.add(5, 9, stop_token_ids=(42,))
    first = scheduler.schedule(0.0)
    drafts = DraftTokenIds(1, int32_bytes([0]), int32_bytes([3]), int32_bytes([41, 42, 43]))
    scheduler.update_from_output(first, ModelRunnerOutput(1, int32_bytes([40]), drafts=drafts), 0.0)
    second = scheduler.schedule(0.0)
    row = RowLogprobs(
        0, 4, int32_bytes([41, 42, 43, 44]), float32_bytes([-1, -2, -3, -4]), int32_bytes([1] * 4)
    )
    result = ModelRunnerOutput(2, int32_bytes([41, 42, 43, 44]), int32_bytes([4]), logprobs=[row])
    outputs = scheduler.update_from_output(second, result, 0.0)[0]
    assert int32_view(outputs.token_ids).tolist() == [41, 42]
    assert int32_view(outputs.num_tokens).tolist() == [2]
    (logprobs,) = outputs.logprobs
    assert logprobs.num_positions == 2
    assert int32_view(logprobs.token_ids).tolist() == [41, 42]
    assert len(logprobs.logprobs) == len(logprobs.ranks) == 8


def test_5_1_each_client_receives_only_its_tokens():
    harness = speculating(3, right(3, num_right=2))
    keys = [harness.add([n + 1] * 4, 10, client=n % 2) for n in range(4)]
    harness.drain()
    assert all(len(harness.received[key].token_ids) == 10 for key in keys)


def test_5_1_drafts_are_validated_by_the_grammar_and_every_position_is_masked():
    harness = speculating(4, lambda row: [3, 2, 4, 6])
    key = harness.add(4, 12, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT))
    harness.compile_grammars()
    harness.step()
    step = harness.schedule()
    # The grammar allows even and odd tokens alternately, and the first token is given.
    assert int32_view(step.drafts).tolist() == [0, 2]
    harness.update()
    harness.drain()
    tokens = harness.received[key].token_ids
    assert [token_id % 2 for token_id in tokens] == [0, 1] * 6


def propose_allowed(row: Row) -> list[int]:
    """Propose tokens that a grammar of alternating even and odd tokens allows."""
    parity = (len(row.token_ids) - row.num_prompt_tokens) % 2
    fingerprint, drafts = row.fingerprints[-1], []
    for index in range(3):
        allowed = [token_id % 2 == (parity + index) % 2 for token_id in range(VOCAB_SIZE)]
        drafts.append(choose_token(fingerprint, VOCAB_SIZE, allowed))
        fingerprint = extend(fingerprint, drafts[-1])
    return drafts


@pytest.mark.parametrize("uses_placeholders", [False, True])
def test_5_1_a_grammar_that_fails_in_the_drafts_ends_only_its_request(uses_placeholders):
    harness = RecordedHarness(
        vocab_size=VOCAB_SIZE,
        speculative=SpeculativeConfig(3),
        propose=propose_allowed,
        async_scheduling=uses_placeholders,
        max_in_flight=1 + uses_placeholders,
    )
    json_object = StructuredOutput(GrammarKind.JSON_OBJECT)
    bad = harness.add(4, 13, structured_output=json_object)
    others = [harness.add(5, 13, structured_output=json_object), harness.add(6, 13)]
    harness.grammar.fails_in_drafts.add(bad)
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert "grammar" in harness.received[bad].finished.message
    assert [harness.received[key].reason for key in others] == [FinishReason.LENGTH] * 2
    replay(harness.dump())


@pytest.mark.parametrize("uses_placeholders", [False, True])
def test_5_1_constrained_requests_take_several_tokens_a_step(uses_placeholders):
    harness = speculating(3, propose_allowed, async_scheduling=uses_placeholders)
    harness.add(4, 13, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT))
    harness.drain()
    assert total(harness).num_accepted_tokens == 9


@pytest.mark.parametrize("uses_placeholders", [False, True])
def test_5_1_a_request_with_an_isolated_grammar_has_no_drafts(uses_placeholders):
    """The token bitmasks after its drafts would not be known in time."""
    harness = speculating(3, propose_allowed, async_scheduling=uses_placeholders)
    key = harness.add(
        4, 13, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT, is_isolated=True)
    )
    harness.drain()
    assert len(harness.received[key].token_ids) == 13
    assert not any(int32_view(step.drafts).any() for step in harness.steps)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_preempted_constrained_request_keeps_its_tokens_in_flight(depth, is_late):
    harness = speculating(
        3,
        propose=lambda row: foresee_constrained(row, 3),
        async_scheduling=True,
        max_in_flight=depth,
    )
    harness.worker.is_late = is_late
    key = harness.add(6, 60, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT))
    harness.compile_grammars()
    for _ in range(3):
        harness.step()
    while harness.num_in_flight < depth:
        harness.schedule()
    num_drafts = [int32_view(step.drafts).tolist() for step in harness.steps[-depth:]]
    assert all(num_drafts)
    num_tokens = len(harness.received[key].token_ids)
    harness.preempt(key)
    while harness.num_in_flight:
        harness.update()
    assert len(harness.received[key].token_ids) >= num_tokens + 2 * depth
    # The harness compares the output with that of the request alone.
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH


def test_5_3_separate_drafts_are_rejected_with_placeholders():
    """A grammar cannot mask tokens after drafts that only the worker has."""
    harness = speculating(3, lambda row: [], async_scheduling=True)
    key = harness.add(4, 9, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT))
    harness.compile_grammars()
    harness.step()
    late = DraftTokenIds(1, int32_bytes(harness.request(key).slot), int32_bytes(1), int32_bytes(3))
    with pytest.raises(EngineError, match=r"step 1 came after its output.*--no-async-scheduling"):
        harness.scheduler.update_draft_token_ids(late)
    harness.drain()


@pytest.mark.parametrize(
    ("method", "num_blocks"), [(ProposerMethod.NGRAM, 2), (ProposerMethod.DRAFT_MODEL, 3)]
)
def test_5_2_lookahead_slots_are_reserved_for_requests_with_drafts(method, num_blocks):
    harness = Harness(block_size=4, speculative=SpeculativeConfig(3, method))
    harness.add(7, 20)
    harness.schedule()
    assert len(harness.scheduler.kv_cache_manager.blocks[0][0]) == num_blocks
    harness.drain()


def test_5_2_lookahead_does_not_exceed_the_length_limit():
    harness = Harness(
        num_blocks=4, block_size=4, speculative=SpeculativeConfig(4, ProposerMethod.DRAFT_MODEL)
    )
    key = harness.add(11, None)
    harness.drain()
    assert len(harness.received[key].token_ids) == 3 * 4 + 1 - 11


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_5_3_drafts_are_scheduled_as_placeholders_and_filled_in_by_the_worker(depth):
    harness = speculating(3, right(3, 2), async_scheduling=True, max_in_flight=depth)
    key = harness.add(6, 16)
    harness.step()
    before = len(harness.steps)
    while harness.num_in_flight < depth:
        harness.schedule()
    assert len(harness.steps) > before
    for step in harness.steps[before:]:
        assert step.draft_token_ids == b""
        assert int32_view(step.drafts).tolist() == [0, 3]
    harness.drain()
    assert len(harness.received[key].token_ids) == 16
    assert total(harness).num_accepted_tokens >= 6


def test_5_3_placeholders_without_drafts_count_as_rejected():
    def propose(row: Row) -> list[int]:
        return foresee(row, 4 if len(row.token_ids) < 9 else 1)

    harness = speculating(4, propose, async_scheduling=True, max_in_flight=2)
    key = harness.add(6, 15)
    harness.drain()
    assert len(harness.received[key].token_ids) == 15
    # Placeholders without drafts are not counted.
    assert total(harness).num_draft_tokens == total(harness).num_accepted_tokens >= 6


def test_5_3_a_request_without_proposals_has_no_placeholders():
    harness = speculating(4, lambda row: [], async_scheduling=True, max_in_flight=2)
    harness.add(6, 9)
    harness.drain()
    assert not any(step.drafts or step.chunks for step in harness.steps[1:])


@pytest.mark.parametrize("uses_placeholders", [False, True])
def test_client_receives_counts_of_its_prediction(uses_placeholders):
    limits = {"async_scheduling": True, "max_in_flight": 2} if uses_placeholders else {}
    harness = speculating(3, propose_prediction, **limits)
    alone = harness.add(6, 20)
    harness.drain()
    right = harness.received[alone].token_ids
    wrong = [(token + 1) % VOCAB_SIZE for token in right]
    keys = [
        harness.add(6, 20, client=client, predicted=predicted)
        for client, predicted in enumerate((right, wrong, right[:8] + wrong[8:], None))
    ]
    harness.drain()
    received = [harness.received[key] for key in keys]
    assert all(each.token_ids == right for each in received)
    accepted = [each.num_accepted_predictions for each in received]
    rejected = [each.num_rejected_predictions for each in received]
    assert accepted[0] > 10
    assert rejected[0] == accepted[1] == accepted[3] == rejected[3] == 0
    assert rejected[1] > 10
    assert 0 < accepted[2] <= 8 < rejected[2]


def test_counts_of_accepted_predictions_are_truncated_with_the_tokens():
    harness = speculating(3, propose_prediction)
    alone = harness.add(6, 20)
    harness.drain()
    right = harness.received[alone].token_ids
    stop = right[2]
    key = harness.add(6, 20, predicted=right, stop_token_ids=(stop,))
    harness.drain()
    assert harness.received[key].token_ids == right[: right.index(stop) + 1]
    assert harness.received[key].num_accepted_predictions == 2


def test_prediction_continues_after_a_crash_and_a_preemption():
    harness = RecordedHarness(
        segment_bytes=4000,
        vocab_size=VOCAB_SIZE,
        speculative=SpeculativeConfig(3),
        propose=propose_prediction,
        inject_preemption=0.3,
    )
    alone = harness.add(6, 60)
    harness.drain()
    right = harness.received[alone].token_ids
    key = harness.add(6, 60, predicted=right)
    for _ in range(6):
        harness.step()
    harness.lose_core()
    harness.drain()
    received = next(h for h in harness.received.values() if h.message.predicted_token_ids)
    assert received.token_ids == right
    assert received.message.is_resubmitted and received.message.was_index == key[1]
    assert received.num_rejected_predictions == 0
    assert received.num_accepted_predictions > 20
    replay(harness.dump())


def test_4_5_acceptance_is_counted_by_position():
    harness = speculating(3, right(3, num_right=2))
    harness.add(6, 10)
    harness.drain()
    per_position = [0, 0, 0]
    for stats in filter(None, (stats.spec_decoding for stats in harness.stats)):
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            per_position[position] += count
    # Three times two of three drafts.
    assert per_position == [3, 3, 0]
    assert total(harness).num_drafts == 3


@pytest.mark.parametrize(
    ("tokens", "counts"), [([1, 2], [1]), ([1] * 5, [5]), ([], [0]), ([1, 2], [1, 1])]
)
def test_an_output_that_does_not_match_its_drafts_is_an_error(tokens, counts):
    harness = speculating(3)
    harness.add(6, 20)
    harness.step()
    step = harness.schedule()
    result = ModelRunnerOutput(step.step, int32_bytes(tokens), int32_bytes(counts))
    with pytest.raises(EngineError, match="for rows with \\[3\\] drafts"):
        harness.scheduler.update_from_output(step, result, 0.0)


@pytest.mark.parametrize("num_verified", [[4], [1, 1], [0]])
def test_an_output_that_verified_other_drafts_is_an_error(num_verified):
    harness = speculating(3)
    harness.add(6, 20)
    harness.step()
    step = harness.schedule()
    result = ModelRunnerOutput(
        step.step, int32_bytes([1, 2]), int32_bytes([2]), int32_bytes(num_verified)
    )
    with pytest.raises(EngineError, match="drafts"):
        harness.scheduler.update_from_output(step, result, 0.0)


def test_inconsistent_drafts_are_an_error():
    harness = speculating(3)
    harness.add(6, 20)
    harness.step()
    wrong = DraftTokenIds(1, int32_bytes([0]), int32_bytes([2]), int32_bytes([1]))
    with pytest.raises(EngineError, match="step 1 returned 1 drafts"):
        harness.scheduler.update_draft_token_ids(wrong)
