"""Servers whose drafts come from a head give the same answers as without drafts."""

from __future__ import annotations

import concurrent.futures
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tiny import (
    layers_directory,
    qwen3_directory,
    random_model,
    sentencepiece_tokenizer,
)
from support.drafts.draft_heads import (
    GEMMA4,
    add_qwen3_5_layer,
    write_assistant,
    write_dflash,
    write_eagle3_head,
)
from support.drafts.dspark_heads import dspark
from support.drafts.eagle_heads import parallel_eagle
from support.drafts.layered_heads import minimax3_layers
from support.drafts.prediction_layers import mimo2_mtp
from support.requests.mixed_streams import Streams, undisturbed_answers
from support.servers.server import Server, assert_nothing_is_held

FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--cpu-backend", "native"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "6", "--inject-preemption", "0.02"),
)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "top_k": 40, "min_tokens": 60},
    {"temperature": 0, "stop": ["e"]},
    {"temperature": 0.7, "seed": 3, "structured_outputs": {"regex": "([a-f]+ [0-9]+, )+"}},
]


def eagle3_on_two_ranks(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model, flags, and the fields that choose its head."""
    _, model = qwen3_directory(path / "model")
    layers = [0, 1, 2]
    write_eagle3_head(path / "head", model.config, 150, eagle_aux_hidden_state_layer_ids=layers)
    fields = {"method": "eagle3", "model": str(path / "head"), "draft_tensor_parallel_size": 1}
    return path / "model", ["-tp", "2"], fields


def eagle3_in_two_stages(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model, flags, and the fields that choose a head that reads hidden states of both stages."""
    model, _, fields = eagle3_on_two_ranks(path)
    del fields["draft_tensor_parallel_size"]
    return model, ["-pp", "2"], fields


def mtp_of_recurrent_model_in_two_stages(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model, flags, and the fields that choose its layer for multi-token prediction."""
    _, model = layers_directory(path, "delta net")
    add_qwen3_5_layer(path, model.config)
    return path, ["-pp", "2"], {"method": "mtp"}


def assistant_on_four_ranks(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a Gemma 4 whose last layers share keys and values, flags, and the fields that choose its assistant."""
    tokenizer, fields = sentencepiece_tokenizer(), GEMMA4 | {"num_kv_shared_layers": 2}
    model = random_model("Gemma4TextConfig", "Gemma4ForCausalLM", fields, tokenizer)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    write_assistant(path / "assistant", model.config, fields)
    flags = ["-tp", "2", "-pp", "2"]
    return path / "model", flags, {"method": "mtp", "model": str(path / "assistant")}


def dflash_of_recurrent_model_on_two_ranks(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model with recurrent layers, flags, and the fields that choose its DFlash head."""
    layers_directory(path / "model", "delta net")
    write_dflash(path / "head", ["full_attention"] * 3)
    return path / "model", ["-tp", "2"], {"method": "dflash", "model": str(path / "head")}


def dflash_of_recurrent_model_in_two_stages(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model with recurrent layers, flags, and the fields that choose its DFlash head."""
    model, _, fields = dflash_of_recurrent_model_on_two_ranks(path)
    return model, ["-pp", "2"], fields


def dspark_on_two_ranks(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model, flags, and the fields that choose its DSpark head."""
    head = dspark(path)
    return path, ["-tp", "2"], {"method": "dspark", "model": head.speculative.model}


def peagle_in_two_stages(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model, flags, and the fields that choose a head that computes all drafts in one pass."""
    head = parallel_eagle(path)
    return path, ["-pp", "2"], {"method": "eagle3", "model": head.speculative.model}


def mtp_of_mimo2(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model with two kinds of layers, flags, and the fields that choose its prediction layer."""
    mimo2_mtp(path)
    return path, ["-tp", "2"], {"method": "mimo_v2_mtp"}


def layers_on_two_ranks(path: Path) -> tuple[Path, list[str], dict[str, Any]]:
    """Return a model with three prediction layers, flags, and the fields that choose them."""
    minimax3_layers(path)
    return path, ["-tp", "2"], {"method": "mtp", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    "make",
    [
        dspark_on_two_ranks,
        layers_on_two_ranks,
        peagle_in_two_stages,
        mtp_of_mimo2,
        dflash_of_recurrent_model_on_two_ranks,
        dflash_of_recurrent_model_in_two_stages,
        eagle3_on_two_ranks,
        eagle3_in_two_stages,
        mtp_of_recurrent_model_in_two_stages,
        assistant_on_four_ranks,
    ],
)
def test_drafting_heads_do_not_change_answers(tmp_path: Path, make: Any) -> None:
    path, flags, fields = make(tmp_path)
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randrange(1, 110))] for _ in SAMPLING]
    requests = [
        {"prompt": prompt, "max_tokens": 90, "ignore_eos": True, "return_token_ids": True} | each
        for prompt, each in zip(prompts, SAMPLING, strict=True)
    ]

    def answers(speculative: dict[str, Any]) -> list[Any]:
        config = json.dumps(speculative)
        with Server(str(path), *FLAGS, *flags, "--speculative-config", config) as server:

            def ask(body: dict[str, Any]) -> Any:
                status, answer = server.post("/v1/completions", body)
                assert status == 200, answer
                (choice,) = answer["choices"]
                return choice["token_ids"], choice["finish_reason"], choice["logprobs"]

            with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
                found = list(pool.map(ask, requests))
            found += [ask(requests[0])]
            assert_nothing_is_held(server)
            verified = server.metric("engine:spec_decode_num_draft_tokens_total")
            assert (verified > 50) == (speculative is not none)
        return found

    none = {"num_speculative_tokens": 0}
    expected = answers(none)
    assert answers({"num_speculative_tokens": 3, "adaptive": False, **fields}) == expected


@pytest.mark.parametrize(
    "make",
    [
        dspark_on_two_ranks,
        layers_on_two_ranks,
        peagle_in_two_stages,
        dflash_of_recurrent_model_in_two_stages,
        eagle3_in_two_stages,
    ],
)
def test_answers_continue_after_a_worker_was_killed(tmp_path: Path, make: Any) -> None:
    path, flags, fields = make(tmp_path)
    config = json.dumps({"num_speculative_tokens": 3, "adaptive": False, **fields})
    requests = [
        {"prompt": "a b c " * number, "max_tokens": 90, "ignore_eos": True, "stream": True} | each
        for number, each in enumerate(SAMPLING, 1)
    ]
    with Server(str(path), *FLAGS, *flags, "--speculative-config", config) as server:
        expected = undisturbed_answers(server, requests)
        victim = server.child("worker 0")
        streams = Streams(server, requests)
        streams.wait_for_events(20)
        victim.kill()
        assert streams.answers() == expected
        server.wait_until_whole()
        verified = server.metric("engine:spec_decode_num_draft_tokens_total")
        assert Streams(server, requests).answers() == expected
        assert server.metric("engine:spec_decode_num_draft_tokens_total") > verified
        assert_nothing_is_held(server)
