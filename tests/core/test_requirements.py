from __future__ import annotations

import pytest
from engine.core.requirements import Requirements
from engine.core.scheduler import Scheduler
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import CacheConfig, SchedulerConfig
from engine.protocol.messages import EngineCoreRequest, FinishReason
from engine.protocol.sampling_params import GrammarKind, SamplingParams, StructuredOutput

REQUIREMENTS = Requirements(
    vocab_size=100,
    max_model_len=50,
    block_size=4,
    num_blocks=10,
    has_grammars=False,
    max_num_queued_reqs=3,
    max_num_queued_tokens=60,
    max_computed_tokens=40,
)


def request(num_tokens: int = 5, **fields: object) -> EngineCoreRequest:
    fields.setdefault("prompt_token_ids", int32_bytes([1] * num_tokens))
    fields.setdefault("sampling_params", SamplingParams(max_tokens=4))
    return EngineCoreRequest(request_index=0, arrival_time=0.0, **fields)


def refusal(message: EngineCoreRequest, reqs: int = 0, tokens: int = 0):
    return REQUIREMENTS.refuse(message, reqs, tokens)


def test_what_fits_is_not_refused():
    assert refusal(request(), reqs=2, tokens=55) is None
    assert refusal(request(40)) is None


@pytest.mark.parametrize(
    ("num_tokens", "numbers"),
    [(50, ("50 tokens", "max_model_len=50", "49")), (41, ("41 tokens", "10", "hold 40")), (0, ())],
)
def test_2_6_a_prompt_that_never_fits_is_ignored_with_the_numbers(num_tokens, numbers):
    reason, message = refusal(request(num_tokens))
    assert reason is FinishReason.IGNORED
    assert all(number in message for number in numbers)


def test_queue_bounds_name_their_limit():
    assert refusal(request(), reqs=3).reason is FinishReason.ABORT
    assert "max_num_queued_reqs=3" in refusal(request(), reqs=3).message
    assert "max_num_queued_tokens=60" in refusal(request(), reqs=1, tokens=56).message


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_token_ids": b"12345"}, "5 bytes"),
        ({"root_hash": b"r" * 32, "block_hashes": b"h" * 31}, "31 bytes, expected 32"),
        ({"eos_token_ids": (100,)}, "stop token 100"),
        ({"sampling_params": SamplingParams(stop_token_ids=(-2,))}, "stop token -2"),
        (
            {
                "sampling_params": SamplingParams(
                    structured_output=StructuredOutput(GrammarKind.REGEX)
                )
            },
            "structured_output",
        ),
    ],
)
def test_an_inconsistent_request_is_an_error_of_its_own(fields, problem):
    reason, message = refusal(request(**fields))
    assert reason is FinishReason.ERROR
    assert problem in message


def test_requests_that_a_slot_is_free_for_do_not_count_as_queued():
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_queued_reqs=2),
        CacheConfig(),
        max_model_len=64,
        vocab_size=100,
        num_blocks=50,
    )
    for index in range(8):
        message = request()
        message.request_index = index
        scheduler.add_request(0, message, 0.0)
    outputs = scheduler.take_outputs(0.0)
    refused = [finished.request_index for finished in outputs[0].finished]
    assert refused == [6, 7], "four run in the next step, two wait, the others are refused"
