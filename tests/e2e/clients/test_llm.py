"""The offline API on the real default model, with every process."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine as public
import numpy as np
import pytest
from engine.frontend.cli.keygen import keygen
from engine.frontend.client.embeddings import LateChunkingParams
from engine.frontend.client.engine_client import EngineDead
from engine.frontend.offline.drop_in.constraints import StructuredOutputsParams, structured_output
from engine.frontend.offline.llm import LLM
from engine.frontend.offline.params import PoolingParams
from engine.frontend.supervisor.supervisor import Supervisor
from engine.protocol.errors import ConfigError, EngineError, ParameterError
from engine.protocol.sampling_params import SamplingParams
from support.processes.open_contexts import open_contexts
from support.processes.waiting import eventually, running_children
from support.servers.server import default_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(default_model(), max_model_len=512, max_num_seqs=8) as llm:
        yield llm


def test_prompts_are_continued_in_their_order(llm: LLM) -> None:
    prompts = ["The capital of France is", "The capital of Italy is", "One, two, three,"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert "Paris" in outputs[0].outputs[0].text
    assert "Rome" in outputs[1].outputs[0].text
    assert outputs[2].outputs[0].text.startswith(" four")
    for output in outputs:
        [only] = output.outputs
        assert len(only.token_ids) == 12 and only.finish_reason == "length"
        times = output.metrics
        assert 0 < times.arrival_time <= times.first_scheduled_time < times.first_token_time
        assert times.first_token_time < times.last_token_time <= times.finished_time
        assert 0 < times.scheduler_time < times.finished_time - times.arrival_time
        assert times.time_in_queue >= 0


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    [by_text] = llm.generate("The capital of France is", GREEDY)
    ids = by_text.prompt_token_ids
    for prompt in (ids, [ids], {"prompt_token_ids": ids}, {"prompt": "The capital of France is"}):
        [output] = llm.generate(prompt, GREEDY)
        assert output.outputs[0].text == by_text.outputs[0].text


def test_outputs_of_one_prompt_differ_and_are_repeatable(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=8)
    [first] = llm.generate("Once upon a time", params)
    [second] = llm.generate("Once upon a time", params)
    texts = [output.text for output in first.outputs]
    assert len(set(texts)) == 3
    assert [output.text for output in second.outputs] == texts


def test_seed_of_minus_one_means_none(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=-1, n=2, max_tokens=24)
    outputs = llm.generate(["Once upon a time"] * 2, params)
    assert len({output.text for each in outputs for output in each.outputs}) == 4


def test_a_chat_answer_ends_with_a_stop_token(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? One short sentence."}]
    [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=60))
    [answer] = output.outputs
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_logprobs_of_prompt_and_output_are_returned(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("The capital of France is", params)
    [only] = output.outputs
    assert only.logprobs is not None and output.prompt_logprobs is not None
    assert [p.token_id for p in only.logprobs] == only.token_ids
    assert all(p.rank == 1 and p.top[0][0] == p.token_id for p in only.logprobs)
    assert output.prompt_logprobs[0] is None
    scored = [p for p in output.prompt_logprobs if p is not None]
    assert [p.token_id for p in scored] == output.prompt_token_ids[1:]
    assert all(math.isfinite(p.logprob) and p.logprob <= 0 for p in scored)
    for position in (*only.logprobs, *scored):
        assert {*position} == {position.token_id, *(token for token, _ in position.top)}
        sampled = position[position.token_id]
        assert (sampled.logprob, sampled.rank) == (position.logprob, position.rank)
        assert [position[token].logprob for token, _ in position.top] == [
            logprob for _, logprob in position.top
        ]
        text = llm.get_tokenizer().decode([position.token_id])
        assert sampled.decoded_token == text and 1 <= len(position) <= 3


def test_logprobs_of_an_output_without_text_have_no_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, detokenize=False, logprobs=1, prompt_logprobs=1)
    [output] = llm.generate("The capital of France is", params)
    assert output.outputs[0].text == ""
    for position in (*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]):
        assert position and all(each.decoded_token is None for each in position.values())


def test_logprobs_of_listed_tokens_are_those_of_the_whole_vocabulary(llm: LLM) -> None:
    listed = (7, 300, 11)
    wanted = SamplingParams(
        temperature=0.0,
        max_tokens=3,
        logprobs=0,
        logprob_token_ids=listed,
        prompt_logprobs=1,
        prompt_logprob_token_ids=listed[:1],
    )
    [output] = llm.generate("The capital of France is", wanted)
    only = output.outputs[0]
    assert only.logprobs is not None and output.prompt_logprobs is not None
    prompt = output.prompt_token_ids
    for place, position in enumerate(only.logprobs):
        before = [*prompt, *only.token_ids[:place]]
        for token, logprob in position.top:
            forced = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(token,))
            [alone] = llm.generate(before, forced)[0].outputs[0].logprobs or ()
            assert (alone.token_id, alone.logprob) == (token, pytest.approx(logprob, abs=1e-4))
        assert tuple(token for token, _ in position.top) == listed
    assert all(p.top[1][0] == 7 for p in output.prompt_logprobs if p is not None)
    rows = [[token, 7] if i % 2 else [token] for i, token in enumerate(prompt[2:])]
    asked: Any = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": 1}
    [scored] = llm.generate(prompt, public.SamplingParams(max_tokens=1, prompt_logprobs=1, **asked))
    assert scored.prompt_logprobs is not None and scored.prompt_token_id_logprobs is not None
    assert scored.prompt_token_id_logprobs.dtype == np.float32
    for row, scores, found, listing in zip(
        rows,
        scored.prompt_token_id_logprobs.tolist(),
        scored.prompt_logprobs[2:],
        output.prompt_logprobs[2:],
        strict=True,
    ):
        assert found is not None and listing is not None and found.top == listing.top[:1]
        assert scores == [listing.logprob, listing.top[1][1] if len(row) > 1 else -math.inf]
    with pytest.raises(ParameterError, match=r"must have a list for each of the \d+ scored tokens"):
        llm.generate(prompt[:-1], public.SamplingParams(max_tokens=1, **asked))


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    for stop in (("six",), ["six"], "six"):
        params = SamplingParams(temperature=0.0, max_tokens=50, stop=stop)  # type: ignore[arg-type]
        [output] = llm.generate("One, two, three, four,", params)
        assert output.outputs[0].text == " five, "
        assert output.outputs[0].stop_reason == "six"


def test_priorities_and_progress_bars_are_those_of_vllm(llm: LLM) -> None:
    """Finished prompts are added to a bar that the caller creates, as with tqdm."""
    added: list[int] = []
    bar = SimpleNamespace(update=added.append, close=lambda: added.append(-1))
    totals: list[int] = []

    def new_bar(*, total: int, desc: str) -> SimpleNamespace:
        totals.append(total)
        return bar

    assert len(llm.generate(["a", "b"], GREEDY, priority=[1, 0], use_tqdm=new_bar)) == 2
    assert len(llm.generate("a", GREEDY, priority=3, use_tqdm=True)) == 1
    assert (totals, added) == ([2], [1, 1, -1])
    with pytest.raises(ParameterError, match="priority has 1 value for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    assert llm.get_tokenizer().decode(llm.generate("a", GREEDY)[0].prompt_token_ids) == "a"


def test_enqueued_prompts_have_the_outputs_of_generate(llm: LLM) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    ids = [*llm.enqueue(prompts[0], GREEDY), *llm.enqueue(prompts[1:], GREEDY)]
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == ids and len({*ids}) == 2
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    assert [output.outputs[0].text for output in outputs] == expected
    assert llm.wait_for_completion() == []


def test_preprocessed_chats_have_the_outputs_of_chat(llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "What is 2 + 2?")]
    prompts = llm.preprocess_chat(chats, chat_template_content_format="string")
    expected = [output.outputs[0].text for output in llm.chat(chats, GREEDY)]
    assert [output.outputs[0].text for output in llm.generate(prompts, GREEDY)] == expected
    assert llm.generate(prompts[0], GREEDY)[0].outputs[0].text == expected[0]
    with pytest.raises(ParameterError, match=r"content_format must be one of .*, got 'xml'"):
        llm.chat(chats, GREEDY, chat_template_content_format="xml")


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, slice(-2, None)),
        ({"truncation": True, "max_length": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1, "max_length": 1}, slice(None)),
    ],
)
def test_prompts_are_cut_to_tokenization_kwargs(
    llm: LLM, choices: dict[str, Any], kept: slice
) -> None:
    text = "The capital of France is"
    ids = [*llm.get_tokenizer().encode(text)]
    for prompt in (text, ids):
        [output] = llm.generate(prompt, GREEDY, tokenization_kwargs=choices)
        assert output.prompt_token_ids == ids[kept]
    with pytest.raises(ParameterError, match="must be -1 or between 1 and 512, got 513"):
        llm.embed(text, tokenization_kwargs=choices | {"truncate_prompt_tokens": 513})
    with pytest.raises(ParameterError, match='has the unknown name "stride"'):
        llm.generate(text, GREEDY, tokenization_kwargs=choices | {"stride": 1})


def test_pooling_params_are_those_of_vllm(llm: LLM) -> None:
    [whole] = llm.embed("a", pooling_params=PoolingParams(use_activation=False))
    params = [PoolingParams(dimensions=4, normalize=False), PoolingParams()]
    short, normal = llm.embed(["a", "a"], pooling_params=params)
    assert short.outputs.embedding == whole.outputs.embedding[:4] != normal.outputs.embedding[:4]
    assert short.outputs.hidden_size == 4
    [encoded] = llm.encode("a b", PoolingParams(task="token_embed", dimensions=3))
    assert [len(row) for row in encoded.outputs.data] == [3, 3]
    for given, message in ((params, "2 values for 1 prompt"), (PoolingParams("x"), "task embed")):
        with pytest.raises(ParameterError, match=message):
            llm.embed("a", pooling_params=given)


@pytest.mark.parametrize("normalize", [True, False])
def test_chunks_of_a_text_have_the_means_of_its_tokens(llm: LLM, normalize: bool) -> None:
    text = "Café, tea and wine."
    [each] = llm.encode(text, PoolingParams("token_embed", use_activation=False))
    tokens_TD = np.array(each.outputs.data)
    params = [
        PoolingParams("token_embed", None, normalize, late_chunking_params=LateChunkingParams(size))
        for size in (1, 3, 100)
    ]
    outputs = llm.encode([text] * 3, params, pooling_task="token_embed")
    for output, size in zip(outputs, (1, 3, 100), strict=True):
        starts = range(0, len(tokens_TD), size)
        expected = np.stack([tokens_TD[start : start + size].mean(0) for start in starts])
        if normalize:
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(output.outputs.data, expected, rtol=1e-4, atol=1e-6)
        assert output.late_chunking is not None
        assert output.late_chunking.input_tokens == len(tokens_TD)
        ranges = [chunk.token_range for chunk in output.late_chunking.chunks]
        assert ranges == [(start, min(start + size, len(tokens_TD))) for start in starts]
        places = [chunk.char_range or (0, 0) for chunk in output.late_chunking.chunks]
        if size > 1:
            assert "".join(text[slice(*place)] for place in places) == text


@pytest.mark.parametrize(
    ("prompt", "task", "choices"),
    [
        ([1, 2, 3], "token_embed", None),
        ("One, two", "token_embed", {"truncate_prompt_tokens": 1}),
        ("One, two", "embed", None),
    ],
)
def test_chunks_need_a_whole_text(
    llm: LLM, prompt: Any, task: str, choices: dict[str, Any] | None
) -> None:
    params = PoolingParams(late_chunking_params=LateChunkingParams(2))
    with pytest.raises(ParameterError, match="late_chunking_params needs"):
        llm.encode(prompt, params, pooling_task=task, tokenization_kwargs=choices)
    with pytest.raises(ParameterError, match="chunk_size must be a positive integer, got 0"):
        LateChunkingParams(0)


def test_sampling_params_take_names_of_vllm(llm: LLM) -> None:
    constraint: Any = {
        "structured_outputs": StructuredOutputsParams(choice=[" Rome", " Paris"]),
        "flat_logprobs": True,
        "skip_clone": True,
    }
    params = public.SamplingParams(temperature=0.0, max_tokens=4, **constraint)
    assert llm.generate("The capital of France is", params)[0].outputs[0].text == " Paris"


def test_an_output_can_be_constrained(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    constraints = [
        {"choice": [" Rome", " Paris"]},
        {"json": schema | {"required": ["city"]}},
        {"regex": r" [A-Z]{3}!"},
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, structured_output=structured_output(**each))
        for each in constraints
    ]
    outputs = llm.generate(["The capital of France is"] * 3, params)
    choice, document, match = (output.outputs[0].text for output in outputs)
    assert choice == " Paris"
    assert set(json.loads(document)) == {"city"}
    assert re.fullmatch(r" [A-Z]{3}!", match)
    with pytest.raises(ParameterError, match="structured_output is not a regex"):
        bad = SamplingParams(structured_output=structured_output(regex="(a"))
        llm.generate("x", bad)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({}, "structured_outputs needs one of json, json_object, regex"),
        ({"regex": "a", "choice": ["a"]}, "must have exactly one constraint, got regex and choice"),
        ({"choice": []}, r"structured_outputs.choice must be an array of strings, got \[\]"),
    ],
)
def test_an_invalid_constraint_is_named(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        structured_output(**constraints)


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm: LLM) -> None:
    prompt = "A sentence that is long enough to fill some blocks of the cache. " * 5
    llm.generate(prompt, GREEDY)
    [again] = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens >= 32
    assert llm.reset_prefix_cache()
    [after] = llm.generate(prompt, GREEDY)
    assert after.num_cached_tokens == 0
    assert after.outputs == again.outputs


def test_outputs_end_with_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=512, ignore_eos=True)
    outputs = llm.generate([[5] * 500, [5] * 509], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_invalid_requests_are_rejected_and_nothing_stays_queued(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="maximum context length is 512"):
        llm.generate(["fine", [5] * 600], GREEDY)
    with pytest.raises(ParameterError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1.0))
    with pytest.raises(ParameterError, match="sampling_params has 1 value for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    # It is refused while a request runs.
    assert llm.reset_prefix_cache()
    assert llm.generate("still fine", GREEDY)[0].outputs[0].finish_reason == "length"


def test_an_int8_cache_gives_the_same_answer() -> None:
    with LLM(default_model(), max_model_len=512, kv_cache_dtype="int8") as llm:
        [output] = llm.generate("The capital of France is", GREEDY)
        assert "Paris" in output.outputs[0].text


def test_a_failed_start_raises_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option max_model_length; did you mean max_model_len\?"
    ):
        LLM(default_model(), max_model_length=512)
    with pytest.raises(EngineError, match="kv-cache-dtype int8 needs the native CPU backend"):
        LLM(default_model(), kv_cache_dtype="int8", cpu_backend="torch")
    with pytest.raises(EngineError, match="kv-cache-dtype fp8 needs a GPU"):
        LLM(default_model(), kv_cache_dtype="fp8", device="cpu")
    with pytest.raises(EngineError, match="nowhere"):
        LLM("/nowhere/at/all.gguf")


def test_a_failed_start_closes_everything(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert keygen(["--out", str(key)]) == 0
    before = open_contexts()
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            LLM(
                default_model(),
                nnodes=2,
                pipeline_parallel_size=2,
                master_port=port,
                cluster_key=str(key),
            )
    # The socket for authentication belongs to a thread, which ends by itself.
    assert eventually(lambda: open_contexts() <= before)


def test_a_worker_crash_ends_generation_with_the_reason() -> None:
    # Processes of the server that other tests share do not count, because it may start some at any time.
    before = running_children()
    llm = LLM(default_model(), max_model_len=512, max_restarts=0)
    try:
        children = running_children() - before
        [worker] = [child for child in children if child.cmdline()[0] == "engine: worker 0"]
        worker.kill()
        with pytest.raises(EngineDead, match="worker 0"):
            while True:
                [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=400))
                assert output.outputs[0].finish_reason in ("error", "length", "stop")
    finally:
        llm.close()
    assert running_children() <= before
    llm.close()


def test_loss_of_the_supervisor_ends_generation_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(supervisor: Supervisor) -> None:
        raise RuntimeError("a test asked for this failure")

    before = running_children()
    with LLM(default_model(), device="null", max_model_len=512) as llm:
        monkeypatch.setattr(Supervisor, "poll", fail)
        with pytest.raises(EngineDead, match="the supervisor failed unexpectedly"):
            while True:
                llm.generate("Once upon a time", SamplingParams(max_tokens=400))
    assert running_children() <= before
