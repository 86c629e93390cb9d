"""A model split among workers in any way gives the tokens of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_view
from engine.protocol.block_hash import HASH_BYTES
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from engine.protocol.config import CPUBackend, ParallelConfig, ProposerMethod, SpeculativeConfig
from engine.protocol.errors import RunDirectoryError
from engine.workers.execution.parallel_state import join_replica
from engine.workers.kv_transfer.block_regions import BlockRegions
from engine.workers.loaders import open_checkpoint
from support.checkpoints.quantized import quantize_directory
from support.checkpoints.tiny import random_model, sentencepiece_tokenizer
from support.drafts.draft_heads import GEMMA4, write_eagle3_head
from support.drafts.models_with_heads import dflash, eagle3, write_model
from support.families import make_multimodal
from support.families.compressed import HASHED
from support.families.experts import GATED
from support.families.published import save_published
from support.families.recurrent import HASHED_NGRAMS, SHARED_BLOCKS
from support.families.split import (
    BESIDE_ATTENTION,
    CONVOLVED,
    INDEXED,
    LATENT_SIZES,
    SHARED_LATENT,
    SHARING,
    SHORTCUTS,
    SMALL_VALUES,
    SPLIT_GROUPS,
    TILED_HEADS,
    TWO_MIXTURES,
    published_sizes,
)
from support.families.split_layers import NATIVE_LAYERS, OTHER_LAYERS
from support.gguf.writer import write_gguf
from support.workers.replica import NUM_TOKENS, RankResult, Served, run_replica, timeouts, workload

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
MODELS = {
    # One key/value head for each query head, one for every two query heads, and one that every rank must copy.
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 12}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"num_key_value_heads": 12, "query_pre_attn_scalar": 32, "sliding_window": 16},
    ),
}
EXPERTS = {
    "num_key_value_heads": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
MIXTURES = {
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", EXPERTS | {"num_experts": 8}),
    # Ranks have two experts or one.
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 5}),
    # Fused projections, and matrices of all experts in one.
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": 96,
            "attn_config": {"kv_n_heads": 12, "clip_qkv": 0.5, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 5, "moe_top_k": 3},
        },
    ),
}
OTHER_MIXTURES = {
    # Biases of experts and of the router, and sinks.
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        EXPERTS | {"num_local_experts": 5, "sliding_window": 16},
    ),
    # Latent attention, a correction bias and groups, whose experts are on several ranks, behind a dense layer.
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        INDEXED
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "longcat": ("LongcatFlashConfig", "LongcatFlashForCausalLM", SHORTCUTS),
}
PRODUCTS = [(1, 3), (2, 2), (4, 1)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write each family as safetensors and as GGUF, quantized where the rows are whole blocks."""
    tokenizer = sentencepiece_tokenizer()
    paths = {}
    for name, (config, model_class, heads) in MODELS.items():
        directory = tmp_path_factory.mktemp(name)
        model = random_model(config, model_class, SIZES | heads, tokenizer)
        model.save_pretrained(directory)
        paths[name] = directory
        paths[f"{name}.gguf"] = write_gguf(
            directory / "model.gguf", model, tokenizer, ggml_type=GGMLQuantizationType.Q8_0
        )
    return paths


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path], tmp_path_factory) -> dict[str, RankResult]:
    return run_alone(checkpoints, tmp_path_factory.mktemp("alone"))


def run_alone(
    checkpoints: dict[str, Path], directory: Path, backend: CPUBackend = CPUBackend.TORCH
) -> dict[str, RankResult]:
    served = [Served(path, backend) for path in checkpoints.values()]
    (results,) = run_replica(directory, ParallelConfig(), served)
    return dict(zip(checkpoints, results, strict=True))


def assert_equal(ranks: list[RankResult], expected: RankResult, parallel: ParallelConfig) -> None:
    output = ranks[parallel.output_rank]
    assert output.tokens == expected.tokens
    assert sum(map(len, output.tokens)) == NUM_TOKENS
    assert np.allclose(output.logprobs, expected.logprobs, atol=1e-4)
    # The ranks of the last stage agree; the others return no tokens.
    assert all(rank.tokens == output.tokens for rank in ranks[parallel.output_rank :])
    assert not any(any(rank.tokens) for rank in ranks[: parallel.output_rank])
    assert_equal_blocks(ranks, expected, parallel.tensor_parallel_size)


def assert_equal_blocks(ranks: list[RankResult], expected: RankResult, size: int) -> None:
    """Check that each rank's blocks are what the only worker would send to it, and that it would get its own back.

    If other layers form a group, servers refuse each other's blocks. Zeros may be values of earlier requests on the
    other side, because a worker clears new blocks only if layers of several groups share its memory.
    """
    whole = {(region.name, region.group): region for region in expected.regions}
    if {(x.name, x.group) for result in ranks for x in result.regions} != whole.keys():
        return
    for number, result in enumerate(ranks):
        own = BlockRegions(result.regions, number % size, size, b"")
        alone = BlockRegions([whole[x.name, x.group] for x in result.regions], 0, 1, b"")
        assert own.fingerprint == alone.fingerprint
        # Padding is written to block 0.
        for block, group in enumerate(result.groups[1:], 1):
            key = bytes(HASH_BYTES) + bytes([group])
            sent = alone.read(key, views_of(expected.blocks[block]), own.own)
            found = own.read(key, views_of(result.blocks[block]), own.own)
            ours, theirs = (np.frombuffer(data, np.float32) for data in (found, sent))
            both = (ours != 0) & (theirs != 0)
            assert np.allclose(ours[both], theirs[both], rtol=1e-3, atol=1e-3), (block, group)
            assert both.any() == ours.any() == theirs.any()
            back = [memoryview(bytearray(len(part))) for part in result.blocks[block]]
            own.write(key, back, alone.own, memoryview(sent))
            assert own.read(key, back, own.own) == sent


def views_of(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def bytes_that_ranks_read(path: Path, parallel: ParallelConfig) -> int:
    """Return the bytes of all tensors, counting again what more than one rank needs."""
    checkpoint = open_checkpoint(path)
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    copies_of_kv_heads = max(1, tensor // checkpoint.config["num_key_value_heads"])
    total = 0
    for name in checkpoint.names():
        before = checkpoint.bytes_read
        checkpoint.tensor(name)
        if name.endswith("norm.weight"):
            times = tensor
        elif "k_proj" in name or "v_proj" in name:
            times = copies_of_kv_heads
        elif "embed_tokens" in name and "lm_head.weight" not in checkpoint.names():
            times = min(stages, 2)
        else:
            times = 1
        total += times * (checkpoint.bytes_read - before)
    return total


@pytest.mark.parametrize(("tensor", "stages"), PRODUCTS)
def test_tokens_equal_those_of_one_worker_and_each_reads_only_its_share(
    tmp_path: Path, checkpoints: dict[str, Path], alone: dict[str, RankResult], tensor, stages
) -> None:
    parallel = ParallelConfig(tensor, stages)
    results = run_replica(tmp_path, parallel, [Served(path) for path in checkpoints.values()])
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)
        bytes_read = [rank.bytes_read for rank in ranks]
        assert sum(bytes_read) == bytes_that_ranks_read(checkpoints[name], parallel), name
        assert max(bytes_read) < 0.75 * alone[name].bytes_read, name
        kv_bytes = sum(rank.block_bytes for rank in ranks)
        assert alone[name].block_bytes <= kv_bytes, name


T = TypeVar("T")

PARTS = range(4)
"""The layers of a test are divided among several cases, so that a sample of the cases is fast."""


def share_of(models: Mapping[str, T], part: int) -> dict[str, T]:
    return dict(list(models.items())[part :: len(PARTS)])


def save_other_layers(directory: Path, names: Iterable[str]) -> dict[str, Path]:
    paths = {name: directory / name for name in names}
    for name, path in paths.items():
        config, model_class, heads = OTHER_LAYERS[name]
        sizes = {k: v for k, v in SIZES.items() if config != "FalconConfig" or k != "head_dim"}
        model = random_model(config, model_class, sizes | heads, sentencepiece_tokenizer())
        model.save_pretrained(path)
    return paths


@pytest.mark.parametrize("part", PARTS)
def test_fused_projections_biases_and_head_norms_can_be_split(tmp_path: Path, part: int) -> None:
    checkpoints = save_other_layers(tmp_path, share_of(OTHER_LAYERS, part))
    alone = run_alone(checkpoints, tmp_path)
    parallel = ParallelConfig(tensor_parallel_size=4)
    served = [Served(path) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)


def layers_that_share_keys_or_differ(backend: CPUBackend) -> dict[str, Callable[[Path], object]]:
    """Return the function that saves each model in a directory."""
    models = {name: (f"{family}Text", family, sizes) for name, (family, sizes) in SHARING.items()}
    models["glm5"] = ("GlmMoeDsa", "GlmMoeDsa", INDEXED)
    models["axk2"] = ("AXK2", "AXK2", INDEXED | {"mlp_layer_types": ["dense", *["sparse"] * 4]})
    models["hy4"] = ("HYV4", "HYV4", INDEXED | {"hc_mult": 3})
    models["mimo-v2"] = ("MiMoV2Flash", "MiMoV2Flash", SMALL_VALUES)
    models["longcat"] = ("LongcatFlash", "LongcatFlash", SHORTCUTS)
    models["cohere2-moe"] = ("Cohere2Moe", "Cohere2Moe", BESIDE_ATTENTION)
    models["dots3-note"] = ("Dots3NoteText", "Dots3Note", LATENT_SIZES)
    models["laguna"] = ("Laguna", "Laguna", GATED)
    models["zamba2"] = ("Zamba2", "Zamba2", SHARED_BLOCKS)
    window = {"attention_window_size": 16}
    models["recurrent-gemma"] = ("RecurrentGemma", "RecurrentGemma", window)
    models["deepseek-v4"] = ("DeepseekV4", "DeepseekV4", HASHED)
    models |= CONVOLVED
    models["qwen4"] = ("Qwen4ExpText", "Qwen4Exp", HASHED_NGRAMS)
    heads = {"n_mamba_heads": 2, "num_key_value_heads": 4}
    models["zamba"] = ("Zamba", "Zamba", SHARED_BLOCKS | heads)
    if backend is CPUBackend.TORCH:
        narrow = {"word_embed_proj_dim": 40, "ffn_dim": 384, "do_layer_norm_before": False}
        models["opt-350m"] = ("OPT", "OPT", narrow)

    def save_text(directory: Path, config: str, family: str, sizes: dict[str, object]) -> None:
        arguments = (f"{config}Config", f"{family}ForCausalLM", SIZES | sizes)
        random_model(*arguments, sentencepiece_tokenizer()).save_pretrained(directory)

    def save_gguf(path: Path) -> None:
        model = random_model(
            "Qwen3_5TextConfig",
            "Qwen3_5ForCausalLM",
            SIZES | TILED_HEADS,
            sentencepiece_tokenizer(),
        )
        tokenizer = sentencepiece_tokenizer()
        write_gguf(path, model, tokenizer, ggml_type=GGMLQuantizationType.Q8_0)

    def save_multimodal(directory: Path, family: str, sizes: dict[str, object]) -> None:
        make_multimodal(family, **SIZES | vocabulary | sizes).save_pretrained(directory)

    def save_own(directory: Path, name: str, sizes: dict[str, object]) -> None:
        save_published(name, directory, **vocabulary, **sizes)

    # Norms without weights, gates of the residual stream, and norms of experts' outputs, which native ranks that share
    # experts do not support.
    layers = ["dense", "dense" if backend is CPUBackend.NATIVE else "sparse"] * 2 + ["dense"]
    vocabulary = {"vocab_size": len(sentencepiece_tokenizer())}
    multimodal: dict[str, dict[str, object]] = {
        "MuseGlimmer": {},
        "MuseSpark": {"mlp_layer_types": layers},
        "Glm5Next": SPLIT_GROUPS,
        "MistralLarge4": INDEXED | SHARED_LATENT,
    }
    published = published_sizes(backend)
    return (
        {
            name: partial(save_text, config=config, family=family, sizes=sizes)
            for name, (config, family, sizes) in models.items()
        }
        | {
            name: partial(save_multimodal, family=name, sizes=sizes)
            for name, sizes in multimodal.items()
        }
        | {name: partial(save_own, name=name, sizes=sizes) for name, sizes in published.items()}
        | {"qwen3.5.gguf": save_gguf}
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("backend", [CPUBackend.TORCH, CPUBackend.NATIVE])
def test_layers_that_share_keys_or_differ_in_their_heads_can_be_split(
    tmp_path: Path, backend: CPUBackend, part: int
) -> None:
    checkpoints = {}
    for name, save in share_of(layers_that_share_keys_or_differ(backend), part).items():
        checkpoints[name] = tmp_path / name
        save(checkpoints[name])
    alone = run_alone(checkpoints, tmp_path, backend)
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    served = [Served(path, backend) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)


@pytest.mark.parametrize("backend", [CPUBackend.TORCH, CPUBackend.NATIVE])
def test_workers_that_divide_experts_give_the_tokens_of_one_worker(
    tmp_path: Path, backend: CPUBackend
) -> None:
    tokenizer = sentencepiece_tokenizer()
    checkpoints = {}
    for name, (config, model_class, experts) in (MIXTURES | OTHER_MIXTURES).items():
        checkpoints[name] = tmp_path / name
        model = random_model(config, model_class, SIZES | experts, tokenizer)
        model.save_pretrained(checkpoints[name])
    # Some tokens choose among the experts of a second mixture, which have another size.
    checkpoints["ernie-vl"] = tmp_path / "ernie-vl"
    sizes = SIZES | TWO_MIXTURES | {"vocab_size": len(tokenizer)}
    model = make_multimodal("Ernie4_5_VLMoe", **sizes)
    (first, *_) = workload(sizes["vocab_size"], 1)[0].new_requests
    for name, token in zip(
        ("image", "image_start"), int32_view(first.token_ids)[[3, 5]], strict=True
    ):
        setattr(model.config, f"{name}_token_id", int(token))
    model.save_pretrained(checkpoints["ernie-vl"])
    alone = run_alone(checkpoints, tmp_path, backend)
    for tensor, stages, whole, names in (
        (2, 1, False, [*MIXTURES, "ernie-vl"]),
        (2, 2, True, [*MIXTURES, "ernie-vl"]),
        (3, 1, True, checkpoints),
    ):
        served = [Served(checkpoints[name], backend) for name in names]
        parallel = ParallelConfig(tensor, stages, enable_expert_parallel=whole)
        directory = tmp_path / f"{tensor} {stages} {whole}"
        directory.mkdir()
        results = run_replica(directory, parallel, served)
        for name, *ranks in zip(names, *results, strict=True):
            assert_equal(ranks, alone[name], parallel)
            most_read = max(rank.bytes_read for rank in ranks)
            assert most_read < 0.75 * alone[name].bytes_read, (name, parallel)


def test_native_pipeline_stages_are_bit_identical_to_one_worker(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    alone = run_alone(checkpoints, tmp_path, CPUBackend.NATIVE)
    parallel = ParallelConfig(pipeline_parallel_size=3)
    served = [Served(path, CPUBackend.NATIVE) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)
        assert ranks[-1].logprobs == alone[name].logprobs


def test_heads_that_read_inner_layers_write_the_drafts_of_one_worker(tmp_path: Path) -> None:
    """The heads read layers of all stages, one of them twice. Gemma 4 also passes on inputs of later layers."""
    (tmp_path / "gemma4").mkdir()
    gemma4 = write_model(
        tmp_path / "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        GEMMA4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300},
    )
    layers = [4, 0, 2]
    directory = tmp_path / "gemma4" / "head"
    write_eagle3_head(directory, gemma4.config, 120, eagle_aux_hidden_state_layer_ids=layers)
    beside = SpeculativeConfig(3, ProposerMethod.EAGLE3, model=str(directory))
    made = [(tmp_path / "gemma4", beside)]
    for make in (eagle3, dflash):
        head = make(tmp_path / make.__name__)
        made.append((head.path, head.speculative))
    served = [
        Served(path, backend, speculative=speculative)
        for path, speculative in made
        for backend in (CPUBackend.NATIVE, CPUBackend.TORCH)
    ]
    (alone,) = run_replica(tmp_path, ParallelConfig(), served)
    for stages in (2, 3):
        parallel = ParallelConfig(pipeline_parallel_size=stages)
        results = run_replica(tmp_path, parallel, served)
        for expected, *ranks in zip(alone, *results, strict=True):
            assert_equal(ranks, expected, parallel)
            assert ranks[-1].drafts == expected.drafts
            assert sum(map(len, expected.drafts)) > NUM_TOKENS


@pytest.mark.parametrize(("tensor", "stages"), [(1, 3), (2, 2)])
def test_asynchronous_devices_give_the_same_tokens(
    tmp_path: Path, checkpoints: dict[str, Path], alone: dict[str, RankResult], tensor, stages
) -> None:
    parallel = ParallelConfig(tensor, stages)
    names = ("llama", "gemma2")
    served = [Served(checkpoints[name], is_accelerated=True) for name in names]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(names, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 2), (4, 1)])
def test_native_tensor_parallel_ranks_give_the_tokens_of_one_worker(
    tmp_path: Path, checkpoints: dict[str, Path], tensor: int, stages: int
) -> None:
    """This also holds with more ranks than processors, which then sleep while they wait for each other.

    Sums of the ranks are added in another order. In float32 the difference is too small to matter; where activations
    are rounded to integers, one of them is occasionally rounded to its neighbor.
    """
    alone = run_alone(checkpoints, tmp_path, CPUBackend.NATIVE)
    parallel = ParallelConfig(tensor, stages)
    served = [Served(path, CPUBackend.NATIVE) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert sum(rank.bytes_read for rank in ranks) == bytes_that_ranks_read(
            checkpoints[name], parallel
        )
        if not name.endswith(".gguf"):
            assert_equal(ranks, alone[name], parallel)
            continue
        output, *others = ranks[parallel.output_rank :]
        assert sum(map(len, output.tokens)) == NUM_TOKENS
        assert all(rank.tokens == output.tokens for rank in others)
        # The log-probabilities of the prompt, which come first, do not depend on the sampled tokens.
        assert np.allclose(output.logprobs[:116], alone[name].logprobs[:116], atol=0.02)


@pytest.mark.parametrize("part", PARTS)
def test_native_ranks_and_stages_divide_other_layers(tmp_path: Path, part: int) -> None:
    checkpoints = save_other_layers(tmp_path, share_of(NATIVE_LAYERS, part))
    alone = run_alone(checkpoints, tmp_path, CPUBackend.NATIVE)
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    served = [Served(path, CPUBackend.NATIVE) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        assert_equal(ranks, alone[name], parallel)


def test_native_ranks_split_quantized_checkpoints(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    config, model_class, heads = MODELS["llama"]
    checkpoints = {}
    for name in ("awq", "gptq", "gptq-act-order", "fp8-blocks", "mxfp4"):
        checkpoints[name] = tmp_path / name
        random_model(config, model_class, SIZES | heads, tokenizer).save_pretrained(tmp_path / name)
        quantize_directory(checkpoints[name], name)
    alone = run_alone(checkpoints, tmp_path, CPUBackend.NATIVE)
    parallel = ParallelConfig(tensor_parallel_size=2)
    served = [Served(path, CPUBackend.NATIVE) for path in checkpoints.values()]
    results = run_replica(tmp_path, parallel, served)
    for name, *ranks in zip(checkpoints, *results, strict=True):
        output = ranks[parallel.output_rank]
        assert output.tokens == alone[name].tokens, name
        assert sum(map(len, output.tokens)) == NUM_TOKENS
        assert all(rank.tokens == output.tokens for rank in ranks)
        assert np.allclose(output.logprobs, alone[name].logprobs, atol=0.02)
        assert max(rank.bytes_read for rank in ranks) < 0.6 * alone[name].bytes_read


def test_a_rank_waits_for_machines_that_join_late(tmp_path: Path) -> None:
    for waits in timeouts(tmp_path, ParallelConfig(tensor_parallel_size=2)):
        assert min(waits) > timedelta(days=7)


def test_an_unwritable_rendezvous_file_is_named() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(RunDirectoryError, match="cannot write /dev/full: No space left"):
        join_replica("file:///dev/full", 0, parallel, torch.device("cpu"))
