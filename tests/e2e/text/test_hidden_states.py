"""Requests return the hidden states of their tokens, in answers and in files, and these equal those of transformers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.frontend.offline.drop_in.engines import AsyncLLM
from engine.frontend.offline.llm import LLM
from engine.frontend.offline.outputs import RequestOutput
from engine.frontend.offline.params import SamplingParams
from engine.protocol.errors import ConfigError, ParameterError
from safetensors.numpy import load_file
from support.checkpoints.tiny import qwen3_directory
from support.servers.server import Server, assert_nothing_is_held

FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny"),
    *("--max-num-batched-tokens", "32", "--max-num-seqs", "6"),
)
LAYERS = [3, 0, 1]
EXTRACTION: dict[str, Any] = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
}
PROMPT = list(range(5, 105))
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


class Reference:
    """The model in transformers."""

    def __init__(self, path: Path) -> None:
        _, self._model = qwen3_directory(path)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of `LAYERS` in ascending order, [T, L, D], and the normed hidden states [T, D]."""
        found: list[torch.Tensor] = []
        norm = self._model.model.norm
        hook = norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        output = self._model.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        inner = [output.hidden_states[layer][0] for layer in sorted(LAYERS) if layer < 3]
        layers_TLD = torch.stack([*inner, found[0][0]], 1)
        return layers_TLD.numpy(), output.last_hidden_state[0].numpy()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = tmp_path_factory.mktemp("model")
    return path, Reference(path)


def connector(directory: Path, **settings: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(directory), **settings}
    name = "ExampleHiddenStatesConnector"
    return {"kv_connector": name, "kv_role": "kv_producer", "kv_connector_extra_config": extra}


def stream(server: Server, route: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a streamed answer."""
    status, text = server.post(route, body | {"stream": True})
    assert status == 200, text
    *chunks, done = text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def assert_near(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "parallel"), [("native", "-tp"), ("torch", "-pp")], ids=lambda value: value
)
def test_files_outlive_preemption_and_a_killed_worker(
    reference: tuple[Path, Reference], tmp_path: Path, backend: str, parallel: str
) -> None:
    """Prompts take several steps and share a prefix, and the requests run together."""
    path, model = reference
    flags = (*FLAGS, "--cpu-backend", backend, parallel, "2", "--inject-preemption", "0.05")
    method, transfer = json.dumps(EXTRACTION), json.dumps(connector(tmp_path / "states"))
    files = ("--speculative-config", method, "--kv-transfer-config", transfer)
    with Server(str(path), *flags, *files) as server:

        def extract(number: int) -> tuple[list[int], np.ndarray]:
            body: dict[str, Any] = {"prompt": PROMPT[: 60 + 8 * number], "max_tokens": 60}
            if number % 2:
                body["kv_transfer_params"] = {"include_output_tokens": True}
            body |= {"model": "tiny", **GREEDY}
            if number % 3:
                answers = stream(server, "/v1/completions", body)
                assert not any("kv_transfer_params" in each for each in answers[:-1])
            else:
                status, answer = server.post("/v1/completions", body)
                assert status == 200, answer
                answers = [answer]
            token_ids = [token for each in answers for token in each["choices"][0]["token_ids"]]
            tokens = body["prompt"] + (token_ids[:-1] if number % 2 else [])
            file = answers[-1]["kv_transfer_params"]["hidden_states_path"]
            with open(f"{file}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = load_file(file)
            assert found["token_ids"].tolist() == tokens
            return tokens, found["hidden_states"]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(extract, number) for number in range(6)]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
            server.child("worker 0").kill()
            for future in futures:
                tokens, states = future.result()
                assert_near(states, model.states(tokens)[0])
        assert not list((tmp_path / "states").glob("*.part"))
        assert_nothing_is_held(server)


def test_answers_contain_states_only_if_the_server_allows_it(
    reference: tuple[Path, Reference],
) -> None:
    path, model = reference
    with Server(str(path), *FLAGS, "--enable-return-hidden-states") as server:

        def post(route: str, **body: Any) -> Any:
            status, answer = server.post(route, {"model": "tiny", **GREEDY, **body})
            assert status == 200, answer
            return answer

        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"input_ids": [PROMPT, PROMPT[:9]], "sampling_params": sampling}
        status, results = server.post("/generate", body | {"return_hidden_states": [True, "last"]})
        assert status == 200, results
        tokens = PROMPT + results[0]["output_ids"][:-1]
        expected = model.states(tokens)[1]
        prompt, *output = results[0]["meta_info"]["hidden_states"]
        assert_near(prompt + output, expected)
        short = PROMPT[:9] + results[1]["output_ids"][:-1]
        assert_near(results[1]["meta_info"]["hidden_states"], model.states(short)[1][-1])
        for wanted in (True, "last"):
            answer = post("/v1/completions", prompt=PROMPT, n=2, return_hidden_states=wanted)
            for choice in answer["choices"]:
                assert_near(choice["hidden_states"], expected[-1])
        chat = post("/v1/chat/completions", prompt_token_ids=PROMPT, return_hidden_states=True)
        assert_near(chat["choices"][0]["hidden_states"], expected[-1])
        assert "hidden_states" not in post("/v1/completions", prompt=PROMPT)["choices"][0]
        stopped = post("/v1/completions", prompt=PROMPT, stop=["e"], return_hidden_states="last")
        tokens = PROMPT + stopped["choices"][0]["token_ids"]
        assert_near(stopped["choices"][0]["hidden_states"], model.states(tokens)[1][-2])
        wanted = {"model": "tiny", **GREEDY, "return_hidden_states": True}
        *_, end, last = stream(server, "/v1/completions", {"prompt": PROMPT, **wanted})
        assert end["choices"][0]["finish_reason"] == "length"
        assert last["choices"][0]["text"] == ""
        assert_near(last["choices"][0]["hidden_states"], expected[-1])
        body = {"prompt_token_ids": PROMPT, **wanted, "return_hidden_states": "last"}
        *_, last = stream(server, "/v1/chat/completions", body)
        assert_near(last["choices"][0]["delta"]["hidden_states"], expected[-1])
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_hidden_states": True}
        *others, last = stream(server, "/generate", body)
        assert others and not any("hidden_states" in each["meta_info"] for each in others)
        prompt, *output = last["meta_info"]["hidden_states"]
        assert_near(prompt + output, expected)
        body = {"prompt": "a", "return_hidden_states": "first"}
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and 'must be true, false or "last"' in answer["error"]["message"]
        assert_nothing_is_held(server)


def test_offline_requests_return_states_and_choose_files(
    reference: tuple[Path, Reference], tmp_path: Path
) -> None:
    path, model = reference
    options: dict[str, Any] = {"dtype": "float32", "speculative_config": EXTRACTION}
    sampling: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    own = tmp_path / "own" / "file"
    params: dict[str, Any] = {"hidden_states_path": str(own), "include_output_tokens": True}
    extra = {"kv_transfer_params": params}
    transfer = connector(tmp_path, allow_custom_save_path=True)
    with LLM(str(path), kv_transfer_config=transfer, **options) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(extra_args=extra, **sampling))
        assert output.kv_transfer_params == {"hidden_states_path": str(own)}
        found = load_file(own)["hidden_states"]
        assert_near(found, model.states(PROMPT + output.outputs[0].token_ids[:-1])[0])
        with pytest.raises(ParameterError, match="writes hidden states to files"):
            llm.generate([PROMPT], SamplingParams(return_hidden_states=True, **sampling))
        (tmp_path / "blocked").touch()
        params["hidden_states_path"] = str(tmp_path / "blocked" / "file")
        [output] = llm.generate([PROMPT], SamplingParams(extra_args=extra, **sampling))
        assert output.outputs[0].finish_reason == "error"
        assert "cannot be written" in str(output.outputs[0].error)
    with LLM(str(path), dtype="float32", hidden_states={"mode": "full", "layers": LAYERS}) as llm:
        wanted = SamplingParams(return_hidden_states=True, **sampling)
        [output] = llm.generate([PROMPT], wanted)
        expected = model.states(PROMPT + output.outputs[0].token_ids[:-1])[0]
        assert_near(output.outputs[0].hidden_states, expected.reshape(len(expected), -1))
    with pytest.raises(ConfigError, match="needs --kv-transfer-config"):
        LLM(str(path), **options)


def test_streams_end_when_their_states_are_complete(
    reference: tuple[Path, Reference], tmp_path: Path
) -> None:
    path, model = reference
    sampling: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}

    async def stream(engine: AsyncLLM, **more: Any) -> list[RequestOutput]:
        return [each async for each in engine.generate(PROMPT, SamplingParams(**sampling, **more))]

    options: dict[str, Any] = {"dtype": "float32", "speculative_config": EXTRACTION}
    transfer = connector(tmp_path, allow_custom_save_path=True)
    engine = AsyncLLM(str(path), kv_transfer_config=transfer, **options)
    (tmp_path / "blocked").touch()
    for file in (tmp_path / "file", tmp_path / "blocked" / "file"):
        extra = {"kv_transfer_params": {"hidden_states_path": str(file)}}
        [last] = asyncio.run(stream(engine, extra_args=extra))[-1].outputs
        assert file.is_file() == (last.finish_reason == "length")
        assert last.finish_reason == "length" or "cannot be written" in str(last.error)
    engine.shutdown()
    states = {"mode": "full", "layers": LAYERS}
    engine = AsyncLLM(str(path), dtype="float32", hidden_states=states)
    *others, output = asyncio.run(stream(engine, return_hidden_states=True))
    engine.shutdown()
    assert others and all(each.outputs[0].hidden_states is None for each in others)
    expected = model.states(PROMPT + output.outputs[0].token_ids[:-1])[0]
    assert_near(output.outputs[0].hidden_states, expected.reshape(len(expected), -1))
