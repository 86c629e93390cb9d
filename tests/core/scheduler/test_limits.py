from __future__ import annotations

import msgspec
import pytest
from engine.core.scheduler.limits import Requirements
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import CacheConfig, SchedulerConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
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
    max_num_queued_reqs_per_tenant=0,
    max_encoder_input_size=8,
    max_step_tokens=20,
    splits_prompts=True,
    splits_encoder_inputs=True,
    max_computed_tokens=40,
    reads_images=False,
    max_source_size=0,
)


def request(num_tokens: int = 5, **fields: object) -> EngineCoreRequest:
    fields.setdefault("prompt_token_ids", int32_bytes([1] * num_tokens))
    fields.setdefault("sampling_params", SamplingParams(max_tokens=4))
    return EngineCoreRequest(request_index=0, arrival_time=0.0, **fields)


def place(position: int, num_tokens: int, size: int = 4) -> EncoderInput:
    return EncoderInput(position, num_tokens, b"content", size)


@pytest.mark.parametrize(
    ("inputs", "limits", "numbers"),
    [
        (
            [place(0, 5, 9)],
            {},
            "make 9 embeddings at once, and the encoder budget and cache hold 8",
        ),
        ([place(0, 0, 5), place(0, 0, 5)], {}, "make 10 embeddings at once"),
        ([place(0, 5, 5), place(5, 5, 5)], {"splits_prompts": False}, "make 10 embeddings at once"),
        ([place(0, 25)], {"splits_encoder_inputs": False}, "25 tokens, which are not split"),
        ([], {"max_source_size": 6}, "one source of at most 6 embeddings"),
        ([place(0, 0, 7)], {"max_source_size": 6}, "one source of at most 6 embeddings"),
    ],
)
def test_2_6_encoder_inputs_that_never_fit_end_as_ignored_with_the_sizes(inputs, limits, numbers):
    requirements = msgspec.structs.replace(REQUIREMENTS, **limits)
    reason, message = requirements.find_refusal(request(30, encoder_inputs=inputs), 0, 0)
    assert reason is FinishReason.IGNORED
    assert numbers in message


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ([place(48, 4)], "4 tokens is at position 48, after 0 and within max_model_len=50"),
        ([place(0, 3), place(2, 2)], "position 2, after 3 and within max_model_len=50"),
        ([place(-1, 2)], "position -1"),
        ([place(0, 2, 0)], "num_tokens=2 and size=0"),
        ([place(0, -1)], "num_tokens=-1 and size=4"),
        ([place(1, 0)], "needs position 0, not 1"),
    ],
)
def test_misplaced_encoder_inputs_are_rejected(inputs, problem):
    reason, text = refusal(request(5, encoder_inputs=inputs))
    assert reason is FinishReason.ERROR
    assert problem in text


def refusal(message: EngineCoreRequest, reqs: int = 0, tokens: int = 0):
    return REQUIREMENTS.find_refusal(message, reqs, tokens)


def test_a_request_at_the_limits_is_accepted():
    assert refusal(request(), reqs=2, tokens=55) is None
    assert refusal(request(40)) is None


@pytest.mark.parametrize(
    ("num_tokens", "numbers"),
    [(50, ("50 tokens", "max_model_len=50", "49")), (41, ("41 tokens", "10", "hold 40")), (0, ())],
)
def test_2_6_a_prompt_that_never_fits_ends_as_ignored_with_the_sizes(num_tokens, numbers):
    reason, message = refusal(request(num_tokens))
    assert reason is FinishReason.IGNORED
    assert all(number in message for number in numbers)


def test_queue_full_errors_name_the_limit():
    assert refusal(request(), reqs=3).reason is FinishReason.REJECTED
    assert "max_num_queued_reqs=3" in refusal(request(), reqs=3).message
    assert "max_num_queued_tokens=60" in refusal(request(), reqs=1, tokens=56).message


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_token_ids": b"12345"}, "5 bytes"),
        ({"root_hash": b"r" * 32, "block_hashes": b"h" * 31}, "31 bytes, expected 32"),
        ({"block_hashes": b"h" * 31}, "31 bytes, expected 0"),
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
def test_an_inconsistent_request_fails_alone(fields, problem):
    reason, message = refusal(request(**fields))
    assert reason is FinishReason.ERROR
    assert problem in message


def test_requests_with_a_free_slot_do_not_count_as_queued():
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
