"""A server with LoRA adapters."""

from __future__ import annotations

import concurrent.futures
import random
from pathlib import Path

import pytest
import torch
import transformers
from engine import BeamSearchParams, LoRARequest
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import EngineError, ParameterError
from engine.protocol.sampling_params import SamplingParams
from support.checkpoints.lora_adapters import greedy, write_adapter, write_gguf_adapter
from support.checkpoints.tiny import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.servers.server import DEVICE, Server, assert_nothing_is_held

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny", "--enable-lora")


def vocabulary_adapters(
    directory: Path, model: transformers.PreTrainedModel
) -> dict[str, transformers.PreTrainedModel]:
    """Write adapters of the embedding and of the output head, which are tied. Return the merged models by name."""
    models = {
        "embedding": write_adapter(directory / "embedding", model, 4, r".*(embed_tokens|v_proj)"),
        "head": write_adapter(directory / "head", model, 5, r"lm_head|.*\.q_proj", r=8),
        "whole": write_adapter(directory / "whole", model, 6, whole=r"lm_head|.*embed_tokens"),
        "tied": write_adapter(
            directory / "tied", model, 7, r".*embed_tokens", ensure_weight_tying=True
        ),
    }
    models["tied"].tie_weights()
    return models


@pytest.mark.parametrize(
    ("flags", "scale"), [(["--lora", "{}"], 1.0), (["--lora-scaled", "{}:0.5"], 0.5)]
)
def test_an_adapter_in_a_gguf_file_applies_to_requests_for_the_model(
    tmp_path: Path, flags: list[str], scale: float
) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    merged = write_adapter(tmp_path / "peft", model, 1, r".*(_proj|embed_tokens)", r=32)
    file = write_gguf_adapter(tmp_path / "own.gguf", tmp_path / "peft", model.config)
    weights = model.state_dict()
    for name, mine in merged.named_parameters():
        mine.data = torch.lerp(weights[name], mine.data, scale)
    prompt = [random.Random(5).randrange(4, 300) for _ in range(40)]
    expected, plain = greedy(merged, prompt, 24), greedy(model, prompt, 24)
    assert expected != plain
    flags = [each.format(file) for each in flags]
    with Server(str(path), *FLAGS[:-1], *flags) as server:
        assert complete(server, "tiny", prompt) == expected
        [listed] = server.get("/lora-adapters")[1]
        assert (listed["path"], listed["scale"]) == (str(file), scale)
        body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "return_tokens": True}
        body |= {"ignore_eos": True}
        for given, tokens in (([], plain), ([{"id": 0, "scale": scale}], expected)):
            status, answer = server.post("/completion", {**body, "lora": given})
            assert (status, answer.get("tokens")) == (200, tokens), answer


def complete(
    server: Server, model: str, prompt: list[int], base_model: str | None = None
) -> list[int]:
    """Return the answer of a model, or with `base_model` of its adapter, which SGLang's `lora_path` names."""
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    if base_model is not None:
        body |= {"model": base_model, "lora_path": model}
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
            lora_bias=True,
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 8},
        ),
        "mlp": write_adapter(
            tmp_path / "mlp", model, 3, r".*\.1\.mlp\.(up|down)_proj", alpha_pattern={"up_proj": 3}
        ),
        **vocabulary_adapters(tmp_path, model),
    }
    rng = random.Random(5)
    prompt = [rng.randrange(4, 300) for _ in range(40)]
    expected = {name: greedy(each, prompt, 24) for name, each in models.items()}
    assert len(set(map(tuple, expected.values()))) == len(models)
    named = [name for name in models if name not in ("tiny", "mlp")]
    modules = [f"{name}={tmp_path / name}" for name in named]
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
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                names = [*models, *models]
                served = list(pool.map(lambda name: complete(server, name, prompt), names))
            assert served == [expected[name] for name in names]
        assert server.metric("engine:prefix_cache_hits_total") > 0
        assert complete(server, "tiny:attention", prompt) == expected["attention"]
        assert complete(server, "attention", prompt, "default") == expected["attention"]
        for name in ("none", "tiny:none", "none:attention"):
            status, answer = server.post("/v1/completions", {"model": name, "prompt": prompt})
            assert status == 404 and "mlp" in answer["error"]["message"]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_prompts_of_one_call_may_use_different_adapters(tmp_path: Path, backend: str) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    merged = write_adapter(tmp_path / "adapter", model, 1, lora_bias=True)
    others = vocabulary_adapters(tmp_path, model)
    prompt = list(range(5, 25))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    modules = [f"one={tmp_path / 'adapter'}", *(f"{name}={tmp_path / name}" for name in others)]
    flags = {"dtype": "float32", "cpu_backend": backend, "max_loras": 8}
    with LLM(str(path), enable_lora=True, lora_modules=modules, **flags) as llm:
        names = ["one", None, *others]
        outputs = llm.generate([prompt] * len(names), params, lora_request=names)
        for output, each in zip(outputs, (merged, model, *others.values()), strict=True):
            assert list(output.outputs[0].token_ids) == greedy(each, prompt, 16)
        with pytest.raises(ParameterError, match="has 1 adapter for 2 prompts"):
            llm.generate([prompt, prompt], params, lora_request=["one"])
        with pytest.raises(ParameterError, match="'other' is not served; adapters: one"):
            llm.generate(prompt, params, lora_request="other")
        # One adapter is sent with the request, and another one does not fit the model.
        same = LoRARequest("two", 2, str(tmp_path / "adapter"))
        (output,) = llm.generate(prompt, params, lora_request=same)
        assert list(output.outputs[0].token_ids) == greedy(merged, prompt, 16)
        write_adapter(tmp_path / "large", model, 1, r=32)
        large = LoRARequest("large", 3, str(tmp_path / "large"))
        (output,) = llm.generate(prompt, params, lora_request=large)
        assert "rank 32, but at most 16" in output.outputs[0].error
        beams = llm.beam_search(prompt, BeamSearchParams(2, 6, ignore_eos=True), lora_request=same)
        params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0)
        (best, _) = beams[0].sequences
        (scored,) = llm.generate(best.tokens, params, lora_request="one")
        assert scored.prompt_logprobs is not None
        sum_ = sum(each.logprob for each in scored.prompt_logprobs[len(prompt) :] if each)
        assert sum_ == pytest.approx(best.cum_logprob, abs=1e-3)


def test_adapters_are_added_and_removed_while_processes_are_killed(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    names = ("first", "second", "third")
    models = {n: write_adapter(tmp_path / n, model, seed) for seed, n in enumerate(names)}
    write_adapter(tmp_path / "large", model, 1, r=32)
    write_adapter(tmp_path / "dora", model, 1, use_dora=True)
    wider = QWEN3 | {"intermediate_size": 2 * model.config.intermediate_size}
    other = random_model("Qwen3Config", "Qwen3ForCausalLM", wider, sentencepiece_tokenizer())
    write_adapter(tmp_path / "other", other, 1)
    rng = random.Random(5)
    prompt = [rng.randrange(4, 300) for _ in range(40)]
    expected = {name: greedy(each, prompt, 24) for name, each in models.items()}
    flags = ("--allow-runtime-lora-updating", "--api-server-count", "2", "-dp", "2")
    flags += ("--max-cpu-loras", "2", "--admin-api-key", "boss")

    def command(server: Server, what: str, **body: object) -> tuple[int, str]:
        headers = {"authorization": "Bearer boss"}
        status, answer = server.post(f"/v1/{what}_lora_adapter", body, headers=headers)
        return status, answer if isinstance(answer, str) else answer["error"]["message"]

    def served(server: Server) -> set[str]:
        return {card["id"] for card in server.get("/v1/models")[1]["data"]}

    with Server(str(path), *FLAGS, *flags) as server:
        assert served(server) == {"tiny"}
        body = {"lora_name": "first", "lora_path": str(tmp_path / "first")}
        assert server.post("/v1/load_lora_adapter", body)[0] == 401
        for name in names:
            added = f"Success: LoRA adapter '{name}' added successfully."
            load = {"lora_name": name, "lora_path": str(tmp_path / name)}
            assert command(server, "load", **load) == (200, added)
        # Refusals, which change nothing.
        for name, problem in (
            ("first", "already been loaded"),
            ("tiny", "is the name of the model"),
            ("missing", "neither a directory nor ORG/NAME"),
            ("large", "rank 32, but at most 16 is allowed"),
            ("dora", "use_dora True is not supported"),
            ("other", "the adapter is for another model"),
        ):
            status, message = command(
                server, "load", lora_name=name, lora_path=str(tmp_path / name)
            )
            assert status == (404 if name == "missing" else 400) and problem in message, message
        assert command(server, "load", lora_name="x")[0] == 400
        assert command(server, "unload", lora_name="x")[0] == 404
        for victim in ("", "worker 0", "core 1", "frontend 0"):
            # Three adapters take turns in two places of each replica, and every frontend serves all of them.
            if victim:
                server.child(victim).kill()
                server.wait_until_whole()
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                wanted = [*names, *names]
                answers = list(pool.map(lambda name: complete(server, name, prompt), wanted))
            assert answers == [expected[name] for name in wanted]
        assert all(served(server) == {"tiny", *names} for _ in range(8))
        # A running request keeps its adapter, even if the name is removed or replaced.
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            running = [pool.submit(complete, server, "first", prompt) for _ in range(6)]
            load = {"lora_name": "first", "lora_path": str(tmp_path / "second")}
            assert command(server, "load", **load, load_inplace=True)[0] == 200
            assert complete(server, "first", prompt) == expected["second"]
            assert command(server, "unload", lora_name="first")[0] == 200
            allowed = (expected["first"], expected["second"])
            assert all(each.result() in allowed for each in running)
        for _ in range(8):
            status, answer = server.post("/v1/completions", {"model": "first", "prompt": prompt})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        # Its files change after it was added, and its place was taken: only its own requests fail.
        with (tmp_path / "third" / "adapter_model.safetensors").open("ab") as file:
            file.write(b"more")
        complete(server, "second", prompt)
        load = {"lora_name": "again", "lora_path": str(tmp_path / "first")}
        assert command(server, "load", **load)[0] == 200
        for rank in ("0", "1"):
            complete(server, "again", prompt)
            headers = {"x-data-parallel-rank": rank}
            body = {"model": "third", "prompt": prompt}
            status, answer = server.post("/v1/completions", body, headers=headers)
            assert status in (200, 400), answer
            assert status == 200 or "changed after it was added" in answer["error"]["message"]
        assert complete(server, "second", prompt) == expected["second"]
        assert_nothing_is_held(server)
        assert server.metric("engine:lora_requests_total") > 0
        _, text = server.get("/metrics")
        assert 'max_lora="1",' in text and "running_lora_adapters" in text


def test_an_adapter_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    write_adapter(tmp_path / "large", model, 1, r=32)
    modules = [f"large={tmp_path / 'large'}"]
    with pytest.raises(EngineError, match="rank 32, but at most 16 is allowed"):
        LLM(str(path), dtype="float32", enable_lora=True, lora_modules=modules)
