"""A server with LoRA adapters."""

from __future__ import annotations

import concurrent.futures
import random
from pathlib import Path

import pytest
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import EngineError, ParameterError
from engine.protocol.sampling_params import SamplingParams
from support.lora_adapters import write_adapter
from support.server import Server
from support.tiny_checkpoints import qwen3_directory

FLAGS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny", "--enable-lora")


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates, with the whole sequence computed for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def complete(server: Server, model: str, prompt: list[int]) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "flags", [("--max-loras", "2"), ("--max-loras", "3", "-tp", "2", "-pp", "2")]
)
def test_a_batch_of_adapters_gives_the_tokens_of_merged_models(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    models = {
        "tiny": model,
        "all": write_adapter(tmp_path / "all", model, 1),
        "attention": write_adapter(
            tmp_path / "attention",
            model,
            2,
            r".*\.(q|v|o)_proj",
            use_rslora=True,
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 8},
        ),
        "mlp": write_adapter(
            tmp_path / "mlp", model, 3, r".*\.1\.mlp\.(up|down)_proj", alpha_pattern={"up_proj": 3}
        ),
    }
    rng = random.Random(5)
    prompt = [rng.randrange(4, 300) for _ in range(40)]
    expected = {name: greedy(each, prompt, 24) for name, each in models.items()}
    assert len(set(map(tuple, expected.values()))) == len(models)
    modules = (f"all={tmp_path / 'all'}", f"attention={tmp_path / 'attention'}")
    json_form = f'{{"name": "mlp", "path": "{tmp_path / "mlp"}"}}'
    with Server(str(path), *FLAGS, "--lora-modules", *modules, json_form, *flags) as server:
        status, listed = server.get("/v1/models")
        assert status == 200
        cards = {card["id"]: (card["root"], card["parent"]) for card in listed["data"]}
        assert cards.keys() == models.keys()
        assert cards["all"] == (str(tmp_path / "all"), "tiny")
        for round_ in range(3):
            # The second time, prompts are in the prefix cache of their adapter. Then the adapters are loaded again.
            if round_ == 2:
                server.child("worker 0").kill()
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                names = [*models, *models]
                served = list(pool.map(lambda name: complete(server, name, prompt), names))
            assert served == [expected[name] for name in names]
        assert server.metric("engine:prefix_cache_hits_total") > 0
        status, answer = server.post("/v1/completions", {"model": "none", "prompt": prompt})
        assert status == 404 and "mlp" in answer["error"]["message"]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_prompts_of_one_call_may_use_different_adapters(tmp_path: Path, backend: str) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    merged = write_adapter(tmp_path / "adapter", model, 1)
    prompt = list(range(5, 25))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    modules = [f"one={tmp_path / 'adapter'}"]
    flags = {"dtype": "float32", "cpu_backend": backend}
    with LLM(str(path), enable_lora=True, lora_modules=modules, **flags) as llm:
        outputs = llm.generate([prompt, prompt], params, lora_request=["one", None])
        for output, each in zip(outputs, (merged, model), strict=True):
            assert list(output.outputs[0].token_ids) == greedy(each, prompt, 16)
        with pytest.raises(ParameterError, match="has 1 entries for 2 prompts"):
            llm.generate([prompt, prompt], params, lora_request=["one"])
        with pytest.raises(ParameterError, match="'other' is not served; adapters: one"):
            llm.generate(prompt, params, lora_request="other")


def test_an_adapter_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    write_adapter(tmp_path / "large", model, 1, r=32)
    modules = [f"large={tmp_path / 'large'}"]
    with pytest.raises(EngineError, match="rank 32, but at most 16 is allowed"):
        LLM(str(path), dtype="float32", enable_lora=True, lora_modules=modules)
