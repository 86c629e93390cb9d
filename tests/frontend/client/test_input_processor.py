import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.frontend.client.executor import ThreadExecutor
from engine.frontend.client.input_processor import InputProcessor
from engine.frontend.client.sequence_io import SequenceRequest
from engine.protocol.arrays import int32_view
from engine.protocol.config import EngineConfig
from engine.protocol.errors import ParameterError
from engine.protocol.messages import EngineCoreRequest
from engine.protocol.sampling_params import GrammarKind, SamplingParams, StructuredOutput
from support.servers.engine_fixtures import MAX_MODEL_LEN, engine_config, smollm2_tokenizer

CONFIG = engine_config(Path("unused"))


def process_all(
    *sequences: SequenceRequest, config: EngineConfig = CONFIG
) -> list[EngineCoreRequest]:
    with closing(ThreadExecutor()) as executor:
        processor = InputProcessor(config, smollm2_tokenizer(), executor)
        return asyncio.run(processor.process(list(sequences), 1.0))


def process(prompt: Any = (1, 2, 3), default: Any = None, **params: Any) -> EngineCoreRequest:
    config = CONFIG
    if default is not None:
        frontend = msgspec.structs.replace(config.frontend, default_sampling=default)
        config = msgspec.structs.replace(config, frontend=frontend)
    [sent] = process_all(SequenceRequest(prompt, SamplingParams(**params)), config=config)
    return sent


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint16)])
def test_any_sequence_of_integers_is_a_prompt(kind: Any) -> None:
    sent = process(kind([5, 6, 7]))
    assert int32_view(sent.prompt_token_ids).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt must not be empty"),
        (
            np.array([[1, 2]]),
            r"prompt must be a one-dimensional list of token ids, got shape \(1, 2\)",
        ),
        ([[1], [2, 3]], "prompt must be a list of integer token ids"),
        ([1, "2"], "prompt must be a list of integer token ids"),
        ([1, -4], r"prompt has token id -4, outside the vocabulary \[0, 49152\)"),
        ([1, 49152], r"prompt has token id 49152, outside the vocabulary \[0, 49152\)"),
        ([1, 2**40], r"prompt has token id 1099511627776, outside"),
        ([1, 2**70], r"prompt must be a list of integer token ids below 2\*\*63"),
        ([1.5], r"prompt must be a list of integer token ids below 2\*\*63"),
        (
            [1] * MAX_MODEL_LEN,
            "prompt is too long: it has 512 tokens. This model's maximum context length is 512 "
            "tokens, prompt and completion together, so at most 511 fit",
        ),
    ],
)
def test_invalid_prompts_are_rejected(prompt: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as refused:
        process(prompt)
    assert refused.value.param == "prompt"


def test_longest_allowed_prompt_leaves_one_output_token() -> None:
    assert process([1] * (MAX_MODEL_LEN - 1)).sampling_params.max_tokens == 1


@pytest.mark.parametrize(
    ("default", "given", "expected"),
    [
        (None, None, MAX_MODEL_LEN - 100),
        (None, 7, 7),
        (None, MAX_MODEL_LEN - 100, MAX_MODEL_LEN - 100),
        ({"max_tokens": 50}, None, 50),
        ({"max_tokens": 5000}, None, MAX_MODEL_LEN - 100),
        ({"max_tokens": 50}, 60, 60),
    ],
)
def test_max_tokens_is_the_requested_or_the_default_value(
    default: Any, given: int | None, expected: int
) -> None:
    assert process([1] * 100, default, max_tokens=given).sampling_params.max_tokens == expected


def test_max_tokens_beyond_the_context_is_rejected_with_the_numbers() -> None:
    with pytest.raises(
        ParameterError,
        match=r"max_tokens is too large: 413\. This model's maximum context length is 512 tokens and "
        "the prompt has 100, so at most 412 can be generated",
    ) as refused:
        process([1] * 100, max_tokens=413)
    assert refused.value.param == "max_tokens"


def test_min_tokens_must_fit_into_the_remaining_context() -> None:
    with pytest.raises(ParameterError, match="min_tokens must not exceed max_tokens=412, got 413"):
        process([1] * 100, min_tokens=413)


def test_a_bad_word_is_banned_at_the_start_and_after_a_space() -> None:
    encode = smollm2_tokenizer().encode
    sent = process(bad_words=(" harsh", "word word"))
    assert sent.sampling_params.bad_words_token_ids == tuple(
        tuple(encode(spelling)) for spelling in ("harsh", " harsh", "word word", " word word")
    )
    assert sent.sampling_params.bad_words == ()


def test_a_bad_word_must_be_a_word() -> None:
    with pytest.raises(ParameterError, match='bad_words must not contain an empty word, got "  "'):
        process(bad_words=("  ",))


def test_stop_strings_require_detokenize() -> None:
    with pytest.raises(ParameterError, match="stop strings need detokenize=true"):
        process(stop=("x",), detokenize=False)


def test_parameters_are_verified_against_the_model() -> None:
    with pytest.raises(ParameterError, match=r"stop_token_ids token id 49152 is outside"):
        process(stop_token_ids=(49152,))
    with pytest.raises(ParameterError, match=r"logprobs must be at most 20 \(--max-logprobs\)"):
        process(logprobs=21)


def test_options_of_text_are_not_sent_to_the_core() -> None:
    params = process(stop=("x",), n=3, seed=5).sampling_params
    assert (params.stop, params.n, params.seed) == ((), 1, 5)


def test_a_server_with_a_seed_draws_repeatable_seeds() -> None:
    def draws(base: int) -> list[int | None]:
        config = msgspec.structs.replace(
            CONFIG, model=msgspec.structs.replace(CONFIG.model, seed=base)
        )
        wanted = SequenceRequest([1], SamplingParams())
        return [sent.sampling_params.seed for sent in process_all(*[wanted] * 3, config=config)]

    assert draws(5) == draws(5) != draws(6)
    assert draws(0) != draws(0)
    assert len({*draws(5)}) == 3


WORDS = tuple(f"unspeakable {i:04}" for i in range(1024))


def test_sequences_share_their_prompt_and_bad_words() -> None:
    prompt, params = [1, 2, 3], SamplingParams(bad_words=WORDS)
    wanted = [
        SequenceRequest(prompt, msgspec.structs.replace(params, seed=seed)) for seed in range(256)
    ]
    first, *others = process_all(*wanted)
    assert len(first.sampling_params.bad_words_token_ids) == 2048
    for other in others:
        assert other.prompt_token_ids is first.prompt_token_ids
        first_ids = first.sampling_params.bad_words_token_ids
        assert other.sampling_params.bad_words_token_ids is first_ids


def test_encoding_many_bad_words_does_not_block_the_event_loop() -> None:
    async def have_turns() -> int:
        num_turns = 0
        with closing(ThreadExecutor()) as executor:
            processor = InputProcessor(CONFIG, smollm2_tokenizer(), executor)
            wanted = [SequenceRequest([1], SamplingParams(bad_words=WORDS))]
            encoding = asyncio.create_task(processor.process(wanted, 1.0))
            await asyncio.sleep(0)
            while not encoding.done():
                num_turns += 1
                await asyncio.sleep(0.001)
            encoding.result()
        return num_turns

    assert asyncio.run(have_turns())


@pytest.mark.parametrize(
    ("params", "field", "size"),
    [
        ({"allowed_token_ids": tuple(range(40_000))}, "allowed_token_ids", 40_000),
        ({"stop_token_ids": tuple(range(1024))}, "stop_token_ids", 1024),
        ({"logit_bias": dict.fromkeys(range(1024), 1.0)}, "logit_bias", 1024),
        ({"bad_words_token_ids": ((5,) * 40_000,)}, "bad_words", 40_000),
    ],
)
def test_the_total_size_of_lists_for_all_sequences_is_bounded(
    params: Any, field: str, size: int
) -> None:
    wanted, most = SequenceRequest([1, 2], SamplingParams(**params)), 2**22
    assert len(process_all(*[wanted] * (most // size))) == most // size
    count = most // size + 1
    with pytest.raises(
        ParameterError,
        match=f"^{field} has {size} .* of {count} sequences, {size * count} in total, but at most {most}",
    ) as refused:
        process_all(*[wanted] * count)
    assert refused.value.param == field


def test_the_total_size_of_a_grammar_for_all_sequences_is_bounded() -> None:
    constraint = StructuredOutput(GrammarKind.REGEX, "a" * 2**20)
    wanted = SequenceRequest([1], SamplingParams(structured_output=constraint))
    process_all(*[wanted] * 64)
    with pytest.raises(ParameterError, match=r"^structured_outputs has 1048576 characters"):
        process_all(*[wanted] * 65)
