"""Programs for vLLM's `LLM` and its engines run with Engine on the real default model."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engine import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Gauge,
    Histogram,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    Vector,
)
from engine.frontend.client.engine_client import EngineDead
from engine.protocol.errors import ParameterError
from support.servers.server import default_model

QUESTION = [{"role": "user", "content": "What is the capital of France? One short sentence."}]
PROMPT = "The capital of France is"
THOUGHTS = "<|im_start|>assistant\n<seed:think>"
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = EngineArgs(model=default_model(), max_model_len=512, max_num_seqs=8)
    with LLM.from_engine_args(options) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    options = AsyncEngineArgs(model=default_model(), max_model_len=512, max_num_seqs=8)
    engine = AsyncLLMEngine.from_engine_args(options)
    yield engine
    engine.shutdown()


def test_tokenizer_has_the_methods_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith("<|im_start|>assistant\n")
    encoded = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    token_ids = encoded.input_ids
    assert token_ids == tokenizer.encode(text) == tokenizer(text)["input_ids"]
    assert encoded.attention_mask == [1] * len(token_ids)
    batch = tokenizer.apply_chat_template([QUESTION, QUESTION], tokenize=False)
    assert batch == [text.removesuffix("<|im_start|>assistant\n")] * 2
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.batch_decode([token_ids, token_ids[:1]])[1] == "<|im_start|>"
    assert "<|im_end|>" not in tokenizer.decode(token_ids, skip_special_tokens=True)
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == len(tokenizer)
    assert vocabulary["<|im_end|>"] == tokenizer.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id
    pieces = tokenizer.tokenize("Hello world")
    assert tokenizer.convert_tokens_to_ids(pieces) == tokenizer.encode("Hello world")
    assert tokenizer.encode(text, truncation=True, max_length=3) == token_ids[:3]
    [output] = llm.generate(
        {"prompt_token_ids": token_ids}, SamplingParams(temperature=0, max_tokens=20)
    )
    assert "Paris" in output.outputs[0].text and output.finished


def test_metrics_have_the_names_and_classes_of_vllm(llm: LLM) -> None:
    def read(name: str) -> Counter | Gauge | Histogram | Vector:
        [metric] = (each for each in llm.get_metrics() if each.name == f"vllm:{name}")
        assert metric.labels["engine"] == "0"
        return metric

    before = read("generation_tokens")
    lengths = read("request_generation_tokens")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # Drafts repeat earlier text.
    llm.generate("one two three one two three one two" * 4, params)
    after = read("generation_tokens")
    assert isinstance(after, Counter) and after.value - before.value == 60
    longer = read("request_generation_tokens")
    assert isinstance(longer, Histogram) and isinstance(lengths, Histogram)
    assert (longer.count - lengths.count, longer.sum - lengths.sum) == (1, 60)
    assert longer.buckets["+Inf"] == longer.count
    usage, accepted = read("kv_cache_usage_perc"), read("spec_decode_num_accepted_tokens")
    assert isinstance(usage, Gauge) and 0 <= usage.value <= 1
    by_position = read("spec_decode_num_accepted_tokens_per_pos")
    assert isinstance(by_position, Vector) and isinstance(accepted, Counter)
    assert sum(by_position.values) == accepted.value > 0


def test_white_space_in_json_can_be_disabled(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "size": {"enum": [1, 2]}},
        "required": ["capital", "size"],
    }
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=constraint)
    [output] = llm.chat(QUESTION, params)
    text = output.outputs[0].text
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_reasoning_ends_after_its_budget(tmp_path: Path) -> None:
    weights = Path(default_model()).read_bytes()
    end, unused = b"</seed:think>", b"<issue_start>"
    assert weights.count(unused) == 1
    (tmp_path / "model.gguf").write_bytes(weights.replace(unused, end))
    params = SamplingParams(temperature=0, max_tokens=24, thinking_token_budget=4)
    with LLM(str(tmp_path), max_model_len=512, reasoning_parser="seed_oss") as llm:
        [output] = llm.generate(THOUGHTS, params)
        [end_token_id] = llm.get_tokenizer().encode(end.decode())
    assert output.outputs[0].token_ids.index(end_token_id) == 4


def test_a_reasoning_budget_needs_a_token_that_ends_reasoning(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="thinking_token_budget needs a model"):
        llm.generate(PROMPT, SamplingParams(max_tokens=8, thinking_token_budget=4))


def test_queued_chats_are_answered_in_their_order(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    direct = llm.chat([QUESTION, QUESTION[:1]], params)
    assert len(llm.enqueue_chat([QUESTION, QUESTION], params)) == 2
    queued = llm.wait_for_completion()
    assert [each.outputs[0].text for each in queued] == [each.outputs[0].text for each in direct]


def test_unsupported_sampling_parameters_are_named() -> None:
    assert SamplingParams.from_optional(top_p=None, logit_bias={"5": 1}).logit_bias == {5: 1}
    with pytest.raises(ParameterError, match="watermarking must be false or omitted, got true"):
        SamplingParams(watermarking=True)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_streams_have_what_their_output_kind_says(
    engine: AsyncLLMEngine, kind: RequestOutputKind
) -> None:
    async def stream() -> list[tuple[str, list[int], bool]]:
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, output_kind=kind)
        found = []
        async for output in engine.generate(PROMPT, params, "a"):
            [only] = output.outputs
            assert output.request_id == "a" and only.logprobs is not None
            assert [each.token_id for each in only.logprobs] == only.token_ids
            found.append((only.text, only.token_ids, output.finished))
        return found

    found = asyncio.run(stream())
    texts = [text for text, _, _ in found]
    whole = "".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]
    assert "Paris" in whole
    assert [finished for _, _, finished in found] == [False] * (len(found) - 1) + [True]
    assert (len(found) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
    if kind is RequestOutputKind.CUMULATIVE:
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


async def end_of(stream: AsyncIterator[RequestOutput]) -> str | None:
    """Return the finish reason of the last output of a stream."""
    reason = None
    async for output in stream:
        reason = output.outputs[0].finish_reason
    return reason


def test_an_aborted_stream_ends_with_that_reason(engine: AsyncLLMEngine) -> None:
    async def run() -> str | None:
        stream = engine.generate(PROMPT, LONG, "b")
        await anext(stream)
        await engine.abort("b")
        return await end_of(stream)

    assert asyncio.run(run()) == "abort"


def test_a_stream_can_be_aborted_before_its_prompt_is_encoded(engine: AsyncLLMEngine) -> None:
    async def run() -> str | None:
        reading = asyncio.create_task(end_of(engine.generate(PROMPT, LONG, "e")))
        await asyncio.sleep(0)
        await engine.abort("e")
        return await reading

    assert asyncio.run(run()) == "abort"


def test_streams_end_when_their_engine_is_shut_down() -> None:
    engine = AsyncLLMEngine(default_model(), max_model_len=512)

    async def run() -> str | None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        return await end_of(stream)

    assert asyncio.run(run()) == "error"
    with pytest.raises(EngineDead, match="the engine is closed"):
        asyncio.run(end_of(engine.generate(PROMPT, LONG)))


def test_invalid_parameters_of_a_stream_are_raised(engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        async for _ in engine.generate(PROMPT, SamplingParams(temperature=-1), "c"):
            pass

    with pytest.raises(ParameterError, match="temperature"):
        asyncio.run(run())


def test_paused_streams_continue(engine: AsyncLLMEngine) -> None:
    async def run(pauses: bool) -> str:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        text = ""
        async for output in engine.generate(PROMPT, params, "d"):
            if pauses:
                pauses = False
                await engine.pause_generation(mode="keep")
                await engine.resume_generation()
            text = output.outputs[0].text
        return text

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_an_engine_is_stepped_until_its_requests_end() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--temperature", type=float)
    line = ["--model", default_model(), "--max_model_len", "512", "--temperature", "0"]
    args = parser.parse_args(line)
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=8)
        for number, prompt in enumerate((PROMPT, "The capital of Italy is")):
            engine.add_request(str(number), prompt, params)
        engine.add_request("2", PROMPT, SamplingParams(temperature=-1))
        texts, problems = {}, []
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except ParameterError as error:
                problems.append(str(error))
                continue
            texts |= {each.request_id: each.outputs[0].text for each in outputs if each.finished}
        assert "Paris" in texts["0"] and "Rome" in texts["1"] and len(texts) == 2
        assert len(problems) == 1 and "temperature" in problems[0]
        assert engine.step() == [] and engine.get_num_unfinished_requests() == 0
        assert engine.reset_prefix_cache()
    finally:
        engine.shutdown()


def test_an_id_is_used_again_after_the_end_of_its_request() -> None:
    engine = LLMEngine(default_model(), max_model_len=512)
    try:
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=1))
        with pytest.raises(ValueError, match="request_id 'a' is the ID of a request that still"):
            engine.add_request("a", PROMPT)
        assert [output.outputs[0].text for output in engine.step()] == [" Paris"]
        assert engine.step() == [] and not engine.has_unfinished_requests()
        engine.add_request("b", PROMPT, SamplingParams(temperature=-1))
        with pytest.raises(ParameterError, match="temperature"):
            while engine.has_unfinished_requests():
                engine.step()
        assert not engine.has_unfinished_requests()
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=1))
        assert [output.request_id for output in engine.step()] == ["a"]
    finally:
        engine.shutdown()
