"""Recognize block-diffusion models, and fit the settings of the server to their blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.config import CacheConfig, Device, KVTransferConfig, ModelImpl
from ...protocol.config.diffusion import (
    BlockDiffusion,
    DenoisingAlgorithm,
    DenoisingConfig,
    Renoising,
)
from ...protocol.errors import ConfigError
from ...protocol.kv_transfer.store import DISK_CONNECTOR
from ...protocol.sampling_params import PENALTIES
from .options import ResolvedModel

_ANSWER_SIZE: Final = 128
"""Default number of masks of an answer, as in the examples of LLaDA."""

_DEFAULTS: Final = {
    "Dream": BlockDiffusion(32, 151666, answer_size=_ANSWER_SIZE, predicts_next=True),
    "llada": BlockDiffusion(32, 126336, answer_size=_ANSWER_SIZE),
    "llada2_moe": BlockDiffusion(32, 156895),
    "llada_moe": BlockDiffusion(32, 156895, answer_size=_ANSWER_SIZE),
    "rnd1": BlockDiffusion(32, 151669, answer_size=_ANSWER_SIZE, predicts_next=True),
    "sdar": BlockDiffusion(4, 151669),
    "sdar_moe": BlockDiffusion(4, 151669),
}
"""Model type -> the blocks of models whose config does not describe them, as in SGLang, or in their own examples."""

_CANVASES: Final = "diffusion_gemma"
"""The model type of models whose blocks are canvases of random tokens."""

_OPTIONS: Final = {
    "dllm_algorithm": "--dllm-algorithm",
    "dllm_algorithm_config": "--dllm-algorithm-config",
}

_CANVASES_AT_ONCE: Final = 32
"""Default number of canvases in a step. They are large enough to use a device well."""

_MIN_TOKENS_PER_STEP: Final = 2
"""Blocks of a request in a step: the last one, whose keys and values are computed, and the one that is denoised."""


def read_block_diffusion(
    config: ConfigFields, text: ConfigFields, generation: ConfigFields
) -> BlockDiffusion | None:
    """Return the blocks of a model, or None if it generates token by token.

    `generation` may have settings for passes.

    Raises:
        CheckpointError: The mask token is outside of the vocabulary, or a setting is invalid.
    """
    if config.get("model_type") == _CANVASES:
        size = config.integer("canvas_length", 256, minimum=2)
        return BlockDiffusion(size, renoising=_read_renoising(generation))
    default = _DEFAULTS.get(str(text.get("model_type")))
    if default is None:
        return None
    mask = text.integer("mask_token_id", default.mask_token_id, minimum=0)
    if mask >= text.integer("vocab_size"):
        raise text.error(
            f"mask_token_id {mask} is outside the vocabulary of {text.integer('vocab_size')} tokens; "
            "set it with --hf-overrides"
        )
    return msgspec.structs.replace(
        default,
        block_size=text.integer("block_size", default.block_size, minimum=2),
        mask_token_id=mask,
        shares_experts=text.get("expert_capacity") is not None,
        predicts_next=text.boolean("predicts_next", default.predicts_next),
    )


def _read_renoising(generation: ConfigFields) -> Renoising:
    sampler = generation.first_section("sampler_config").config
    found = {**generation.config, **sampler}
    known = {
        name: found[name] for name in Renoising.__struct_fields__ if found.get(name) is not None
    }
    try:
        return msgspec.convert(known, Renoising)
    except msgspec.ValidationError as error:
        raise generation.error(str(error)) from None


def fit_model(
    resolved: ResolvedModel, scheduler: Mapping[str, Any], device: Device
) -> ResolvedModel:
    """Return the model with the blocks that `--dllm-algorithm-config` asks for, and a length of whole blocks.

    Penalties that the checkpoint recommends do not apply. The null device generates token by token.

    Raises:
        ConfigError: The settings are for a block-diffusion model, and this is none, or they do not fit.
    """
    model = resolved.config
    blocks = model.diffusion
    if blocks is None:
        for field, flag in _OPTIONS.items():
            if field in scheduler:
                raise ConfigError(
                    f"{flag}: {model.served_names[0]} ({model.architecture}) is not a block-diffusion model; "
                    f"remove the flag. These models are: {', '.join((*_DEFAULTS, _CANVASES))}"
                )
        return resolved
    if device is Device.NULL:
        return msgspec.structs.replace(
            resolved, config=msgspec.structs.replace(model, diffusion=None)
        )
    if model.model_impl is ModelImpl.TRANSFORMERS:
        raise ConfigError(
            f"--model-impl transformers cannot denoise the blocks of {model.served_names[0]}; remove the flag"
        )
    if model.enable_prompt_embeds:
        raise ConfigError(
            "--enable-prompt-embeds is not supported for block-diffusion models; remove the flag"
        )
    settings: DenoisingConfig = scheduler.get("dllm_algorithm_config", DenoisingConfig())
    blocks = _with_settings(blocks, settings)
    size = settings.block_size or blocks.block_size
    if blocks.shares_experts and size != blocks.block_size:
        raise ConfigError(
            f"--dllm-algorithm-config: block_size {size} must be {blocks.block_size}, because the tokens of a block "
            "share their experts (expert_capacity)"
        )
    answer_size = blocks.answer_size
    if settings.answer_size is not None:
        if not answer_size:
            raise ConfigError(
                f"--dllm-algorithm-config: answer_size {settings.answer_size} does not apply to "
                f"{model.served_names[0]}, whose tokens do not attend to later blocks; remove it"
            )
        answer_size = settings.answer_size
    if answer_size % size:
        raise ConfigError(
            f"--dllm-algorithm-config: answer_size {answer_size} must be a multiple of block_size, which is {size}"
        )
    blocks = msgspec.structs.replace(blocks, block_size=size, answer_size=answer_size)
    length = model.max_model_len - model.max_model_len % blocks.token_unit
    if not length:
        raise ConfigError(
            f"--max-model-len {model.max_model_len} is below the {size} tokens of a block; raise it"
        )
    sampling = resolved.default_sampling
    return msgspec.structs.replace(
        resolved,
        config=msgspec.structs.replace(model, max_model_len=length, diffusion=blocks),
        default_sampling={name: sampling[name] for name in sampling if name not in PENALTIES},
    )


def _with_settings(blocks: BlockDiffusion, settings: DenoisingConfig) -> BlockDiffusion:
    """Return blocks with the settings that `--dllm-algorithm-config` gives for canvases."""
    if blocks.renoising is None:
        return blocks
    renoising = settings.change(blocks.renoising)
    if renoising.t_max < renoising.t_min:
        raise ConfigError(
            f"--dllm-algorithm-config: t_max {renoising.t_max:g} must be at least t_min, which is "
            f"{renoising.t_min:g}"
        )
    return msgspec.structs.replace(blocks, renoising=renoising)


def fit_scheduler(
    given: dict[str, Any], blocks: BlockDiffusion, num_stages: int, max_model_len: int
) -> None:
    """Set the scheduler's settings for a block-diffusion model.

    Raises:
        ConfigError: A given setting contradicts the blocks.
    """
    size = blocks.block_size
    renoise = DenoisingAlgorithm.GEMMA4_RENOISE
    algorithm = given.setdefault(
        "dllm_algorithm", DenoisingAlgorithm.LOW_CONFIDENCE if blocks.renoising is None else renoise
    )
    if (algorithm is renoise) != (blocks.renoising is not None):
        others = [each for each in DenoisingAlgorithm if each is not renoise]
        needed = renoise if blocks.renoising is not None else " or ".join(others)
        raise ConfigError(f"--dllm-algorithm {algorithm} does not fit the model; use {needed}")
    if num_stages > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is not supported for block-diffusion models; use "
            "--tensor-parallel-size"
        )
    if given.get("speculative") is not None:
        raise ConfigError(
            "--speculative-config is not supported for block-diffusion models, which generate several tokens "
            "in a pass; remove the flag"
        )
    if given.get("enable_chunked_prefill") is False:
        raise ConfigError(
            "--no-enable-chunked-prefill is not supported for block-diffusion models; remove the flag"
        )
    longest = max_model_len + blocks.answer_size
    if blocks.answer_size and given.get("max_num_batched_tokens", longest) < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {given['max_num_batched_tokens']} must be at least {longest}, which is "
            f"--max-model-len plus the {blocks.answer_size} tokens of an answer, because a pass computes all of them; "
            "raise the first or lower the second"
        )
    for field in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        if 0 < given.get(field, 0) < _MIN_TOKENS_PER_STEP * size:
            raise ConfigError(
                f"--{field.replace('_', '-')} {given[field]} must be at least "
                f"{_MIN_TOKENS_PER_STEP * size}, two blocks of the model; raise it"
            )
    # A pass can only follow when the previous one has ended, so no step is scheduled ahead.
    given.update(diffusion=blocks, speculative=None, async_scheduling=False)
    if blocks.answer_size:
        given["enable_chunked_prefill"] = False


def count_step_tokens(blocks: BlockDiffusion, num_seqs: int, max_model_len: int) -> int:
    """Return how many tokens a step has at least by default.

    These are the longest request and its masks if a pass computes a whole request. Otherwise, they are a block for each
    of `num_seqs` requests, or for some if blocks are canvases.
    """
    if blocks.answer_size:
        return max(num_seqs, max_model_len + blocks.answer_size)
    num_blocks = min(num_seqs, _CANVASES_AT_ONCE) if blocks.renoising else num_seqs
    return num_blocks * blocks.block_size


def fit_cache(given: dict[str, Any], blocks: BlockDiffusion) -> None:
    """Let each block of the KV cache hold whole blocks of the model, because a token's keys depend on all of its block.

    Raises:
        ConfigError: The given size is no multiple of the model's blocks.
    """
    if blocks.answer_size:
        given["enable_prefix_caching"] = False
    size = given.get("block_size")
    if size is None:
        given["block_size"] = math.lcm(CacheConfig().block_size, blocks.token_unit)
    elif size % blocks.token_unit:
        raise ConfigError(
            f"--block-size {size} must be a multiple of the model's blocks of {blocks.block_size} tokens"
        )


def check_transfer(config: KVTransferConfig | None) -> None:
    """Raise ConfigError for a KV connector that may load parts of blocks, which only servers exchange."""
    if config is not None and config.kv_connector != DISK_CONNECTOR:
        raise ConfigError(
            f"the KV connector {config.kv_connector} (--kv-transfer-config, --replica-roles) is not supported for "
            "block-diffusion models; remove the flag"
        )
