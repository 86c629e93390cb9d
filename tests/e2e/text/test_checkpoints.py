"""Models other than the default one, served from files, give the tokens of transformers."""

from __future__ import annotations

import concurrent.futures
import json
import random
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import SamplingParams
from support.checkpoints.likely_tokens import likely_tokens
from support.checkpoints.quantized import quantize_directory
from support.checkpoints.tiny import TEXT, gemma3_gguf, mixture_directory, qwen3_directory
from support.servers.server import Server, default_model

pytestmark = pytest.mark.sampled

EXACT = ("--dtype", "float32", "--served-model-name", "tiny")


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return output[0, len(prompt) :].tolist()


def shortfalls(
    model: transformers.PreTrainedModel, prompt: list[int], tokens: list[int]
) -> torch.Tensor:
    """Return how far each token's logit lies below the largest at its position: float32 [T]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def serve_greedy(server: Server, prompt: list[int], count: int) -> list[int]:
    status, answer = server.post(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == count
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("make", "backend"),
    [(gemma3_gguf, "torch"), (mixture_directory, "native")],
)
def test_tokens_equal_those_of_transformers(tmp_path: Path, make, backend: str) -> None:
    path, model = make(tmp_path)
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randrange(1, 90))] for _ in range(12)]
    # A budget of 32 tokens cuts the prompts into chunks that share steps with other requests' decodes.
    flags = ("--cpu-backend", backend, "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    with Server(str(path), *EXACT, *flags) as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            served = list(pool.map(lambda p: serve_greedy(server, p, 40), prompts))
        for prompt, tokens in zip(prompts, served, strict=True):
            assert tokens == likely_tokens(model, prompt, tokens)
        _, tokens = server.post("/tokenize", {"prompt": TEXT})
        _, text = server.post("/detokenize", {"tokens": tokens["tokens"]})
        assert text["prompt"].removeprefix("<bos>") == TEXT


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("fp8-blocks", ("--cpu-backend", "native")),
        ("compressed-int4", ("--cpu-backend", "torch", "--tensor-parallel-size", "2")),
    ],
)
def test_a_quantized_checkpoint_gives_the_tokens_of_its_values(
    tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    path, model = qwen3_directory(tmp_path)
    model.load_state_dict(quantize_directory(path, name), strict=False)
    prompt = [random.Random(9).randrange(4, 300) for _ in range(40)]
    with Server(str(path), *EXACT, *flags) as server:
        tokens = serve_greedy(server, prompt, 40)
        assert tokens == likely_tokens(model, prompt, tokens)


def test_int8_activations_change_only_near_ties(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    model.load_state_dict(quantize_directory(path, "awq"), strict=False)
    prompt = [random.Random(9).randrange(4, 300) for _ in range(40)]
    with Server(str(path), *EXACT, "--cpu-backend", "native", "--quantization", "awq") as server:
        tokens = serve_greedy(server, prompt, 40)
    assert shortfalls(model, prompt, tokens).amax() < 0.002


def test_a_sliding_window_holds_few_blocks(tmp_path: Path) -> None:
    path, model = gemma3_gguf(tmp_path)
    rng = random.Random(7)
    prompt = [rng.randrange(4, 300) for _ in range(330)]
    # Six of the seven layers have a window of 16 tokens, and also hold the tokens of steps in flight, including drafts.
    # 470 tokens in blocks of 16 take 30 blocks per layer, 210 in all.
    flags = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    with Server(str(path), *EXACT, *flags, "--num-gpu-blocks-override", "90") as server:
        tokens = serve_greedy(server, prompt, 140)
        assert tokens == likely_tokens(model, prompt, tokens)
        again = serve_greedy(server, [*prompt, 5], 8)
        assert again == likely_tokens(model, [*prompt, 5], again)
        assert server.metric("engine:prefix_cache_hits_total") > 0
        assert server.metric("engine:num_preemptions_total") == 0


def test_preempted_requests_resume_with_the_same_tokens(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    rng = random.Random(6)
    prompts = [[rng.randrange(4, 300) for _ in range(20)] for _ in range(6)]
    # Six requests of 80 tokens each on 15 blocks of 16 tokens: they cannot all stay.
    flags = ("--max-model-len", "128", "--num-gpu-blocks-override", "16")
    with Server(str(path), *EXACT, *flags) as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            served = list(pool.map(lambda p: serve_greedy(server, p, 60), prompts))
        for prompt, tokens in zip(prompts, served, strict=True):
            assert tokens == likely_tokens(model, prompt, tokens)
        assert server.metric("engine:num_preemptions_total") > 0
        assert server.metric("engine:kv_cache_usage_perc") == 0
        status, answer = server.post("/v1/completions", {"prompt": [5] * 129, "max_tokens": 1})
        assert status == 400
        assert "128" in answer["error"]["message"] and "129" in answer["error"]["message"]


def test_swapped_requests_resume_with_the_same_tokens(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    rng = random.Random(6)
    prompts = [[rng.randrange(4, 300) for _ in range(20)] for _ in range(6)]
    flags = ("--max-model-len", "128", "--num-gpu-blocks-override", "16")
    swap = ("--kv-host-gib", "0.01", "--preemption-mode", "swap", "--inject-preemption", "0.05")
    with Server(str(path), *EXACT, *flags, *swap) as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            served = list(pool.map(lambda p: serve_greedy(server, p, 60), prompts))
        for prompt, tokens in zip(prompts, served, strict=True):
            assert tokens == likely_tokens(model, prompt, tokens)
        assert server.metric("engine:kv_blocks_copied_out_total") > 0
        assert server.metric("engine:kv_blocks_copied_in_total") > 0


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path, _ = qwen3_directory(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"}
    (path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "engine.frontend.cli.main", "serve", str(path), "--port", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "MysteryForCausalLM" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_model_without_tokenizer_files_serves_token_ids(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    for file in path.iterdir():
        if file.name != "config.json" and "safetensors" not in file.name:
            file.unlink()
    prompt = [random.Random(3).randrange(4, 300) for _ in range(20)]
    expected = greedy(model, prompt, 8)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with Server(str(path), *EXACT, "--skip-tokenizer-init") as server:
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert (choice["text"], choice["token_ids"]) == ("", expected)
        assert choice["prompt_token_ids"] == prompt
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in expected]
        stopped = server.post("/v1/completions", body | {"stop_token_ids": expected[2:3]})[1]
        assert stopped["choices"][0]["token_ids"] == expected[: expected.index(expected[2]) + 1]
        assert stopped["choices"][0]["stop_reason"] == expected[2]

        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=8, temperature=0, stream=True
        )
        streamed = [token_id for chunk in stream for token_id in chunk.choices[0].token_ids]
        assert streamed == expected[: len(streamed)] and streamed

        messages = [{"role": "user", "content": "x"}]
        for route, fields, param in (
            ("/v1/completions", {"prompt": "text"}, "prompt"),
            ("/v1/completions", {"prompt": ["text"]}, "prompt[0]"),
            ("/v1/completions", {"stop": "."}, "stop"),
            ("/v1/completions", {"bad_words": ["x"]}, "bad_words"),
            ("/v1/completions", {"guided_regex": "a+"}, "guided_regex"),
            ("/v1/completions", {"response_format": {"type": "json_object"}}, "response_format"),
            ("/v1/chat/completions", {"messages": messages}, "messages"),
            ("/tokenize", {"prompt": "text"}, "prompt"),
            ("/tokenize", {"messages": messages}, "messages"),
            ("/detokenize", {"tokens": [5]}, "tokens"),
        ):
            fields = {"prompt": prompt} | fields if route == "/v1/completions" else fields
            status, answer = server.post(route, fields)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert "--skip-tokenizer-init" in answer["error"]["message"]
            assert answer["error"]["message"].startswith(f"{param} ")


def test_without_a_tokenizer_the_offline_api_takes_token_ids() -> None:
    greedily = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(default_model(), max_model_len=128, skip_tokenizer_init=True) as llm:
        [output] = llm.generate([5, 6, 7], greedily)
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 4)
        for prompt, params in (("text", greedily), ([5], SamplingParams(stop=(".",)))):
            with pytest.raises(ParameterError, match="--skip-tokenizer-init"):
                llm.generate(prompt, params)
