"""Build the `EngineConfig` that every process reads from the settings of the command line and the resolved model."""

from __future__ import annotations

import contextlib
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.content_hash import hash_content
from ...protocol.checkpoint.model_dimensions import check_parallel
from ...protocol.cluster_key import load_cluster_key
from ...protocol.config import (
    FIRST_EPOCH,
    CacheConfig,
    Device,
    DeviceConfig,
    EngineConfig,
    FrontendConfig,
    ModelConfig,
    ParallelConfig,
    PreemptionMode,
    PrefixHash,
    ProposerMethod,
    RecoveryConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StoreConfig,
)
from ...protocol.config.images.settings import SpanKind
from ...protocol.config.images.tiles import MosaicProcessor
from ...protocol.config.scheduler import DEFAULT_SPECULATION
from ...protocol.errors import ConfigError, counted
from ...protocol.file_identity import identify_files
from ..cache_directory import cache_directory
from ..model_source import diffusion
from ..model_source.options import ModelOptions, ResolvedModel
from .arguments import Settings
from .kv_transfer import make_kv_transfer, most_tokens_with_states, with_hidden_states
from .machine.gpu_memory import smallest_gpu_memory
from .machine.gpus import count_gpus, has_gpu
from .option_values import PerReplica
from .options import cpu_defaults

MAX_PORT = 65535
_SOURCES_AT_ONCE = 4
"""Default number of audio clips or texts that a GPU encodes in one step."""
_KEPT_SOURCES = 16
"""Default minimum number of cached encoder outputs of clips or texts. Several requests read one window of a clip."""
_ADDED_CLIPS = 16
"""Default maximum of running requests with clips that are added to tokens. Each keeps the state of an encoder."""
_KEPT_EMBEDDINGS = 4096
"""Default minimum number of cached embeddings of images or audio."""
_LOADED_LORAS = 8
"""Default minimum number of LoRA adapters that stay loaded."""
_LARGE_GPU_BYTES = 70 << 30
"""From this memory on, a GPU is large, such as an H100."""
_SEQS_OF_LARGE_GPU, _STEP_OF_LARGE_GPU = 1024, 8192
"""Default sequences, and tokens of a step, on a large GPU."""
_MOST_TOKEN_IDS = 1 << 27
"""Token IDs of all sequences on a large GPU, of 4 bytes each, by default."""
_BYTES = {"float32": 4, "int8": 1, "fp8": 1, "fp8_e4m3": 1}
"""Dtype -> bytes per number, for the dtypes whose numbers do not have 2 bytes."""


def make_engine_config(settings: Settings, model: ResolvedModel, run_dir: str) -> EngineConfig:
    """Build the engine's configuration.

    Raises:
        ConfigError: Two settings contradict each other; the message names both flags.
    """
    device = DeviceConfig(**settings["device"])
    if device.packed_weights_gib:
        # Without a directory that this user can write, a worker packs weights at each start.
        with contextlib.suppress(ConfigError, OSError):
            directory = str(cache_directory("packed"))
            device = msgspec.structs.replace(device, packed_weights_path=directory)
    settings = with_hidden_states(settings)
    model = diffusion.fit_model(model, settings["scheduler"], device.device)
    parallel = _as_first_node(make_parallel_config(settings))
    cache = _make_cache_config(settings, parallel, model, device.device)
    _check_prefix_hash(cache)
    scheduler = _make_scheduler_config(
        settings,
        device.device,
        parallel.pipeline_parallel_size,
        model=model.config,
    )
    if model.config.is_encoder and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: "
            f"{model.config.served_names[0]} is an encoder, which cannot be divided into "
            "stages; remove the flag"
        )
    _check_cpu_offload(cache, scheduler)
    kv_transfer, cache = make_kv_transfer(
        settings["cache"].get("kv_transfer"), cache, parallel, device.device
    )
    if model.config.diffusion is not None:
        diffusion.check_transfer(kv_transfer)
    frontend = make_frontend_config(settings, model.default_sampling)
    if model.config.enable_prompt_embeds and (
        model.config.span_kind is not None or model.config.reads_source
    ):
        raise ConfigError(
            "--enable-prompt-embeds is not supported for encoder-decoder models and for "
            "models in which the tokens of an image attend to each other; remove the flag"
        )
    if frontend.allow_runtime_lora_updating and not model.config.enable_lora:
        raise ConfigError("--allow-runtime-lora-updating needs --enable-lora; give both or neither")
    if model.dimensions is not None:
        check_parallel(model.dimensions, parallel)
    _check_gpus(device.device, parallel)
    return EngineConfig(
        run_dir=run_dir,
        epoch=FIRST_EPOCH,
        model=_with_chat_template(model.config, frontend.chat_template),
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        device=device,
        recovery=RecoveryConfig(**settings["recovery"]),
        kv_transfer=kv_transfer,
        store=_make_store_config(settings),
        frontend=frontend,
    )


def _make_store_config(settings: Settings) -> StoreConfig:
    """Return the configuration of the store, with an absolute path."""
    store = StoreConfig(**settings["store"])
    if store.path is None:
        return store
    return msgspec.structs.replace(store, path=os.path.abspath(os.path.expanduser(store.path)))


def _with_chat_template(model: ModelConfig, template: str | None) -> ModelConfig:
    """Add a `--chat-template` file to the files that must not change while the server runs."""
    with contextlib.suppress(OSError, ValueError):
        if template is not None and Path(template).is_file():
            files = (
                *model.tokenizer_files,
                *identify_files([os.path.abspath(template)], hash_content),
            )
            return msgspec.structs.replace(model, tokenizer_files=files)
    return model


def make_parallel_config(settings: Settings) -> ParallelConfig:
    """Build the parallel configuration.

    Raises:
        ConfigError: The settings contradict each other, or are incomplete or invalid for several machines.
    """
    given = dict(settings["parallel"])
    num_roles = len(given.get("replica_roles", ()))
    if num_roles and given.setdefault("data_parallel_size", num_roles) != num_roles:
        raise ConfigError(
            f"--replica-roles names {counted(num_roles, 'replica')}, but --data-parallel-size is "
            f"{given['data_parallel_size']}; remove --data-parallel-size"
        )
    parallel = ParallelConfig(**given)
    if parallel.divides_experts_among_replicas and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--enable-expert-parallel with --data-parallel-size {parallel.data_parallel_size} does not "
            f"support --pipeline-parallel-size {parallel.pipeline_parallel_size}; use "
            "--tensor-parallel-size instead"
        )
    if not parallel.is_distributed:
        if parallel.cluster_key is None:
            return parallel
        load_cluster_key(parallel.cluster_key)
        return msgspec.structs.replace(parallel, cluster_key=os.path.abspath(parallel.cluster_key))
    if parallel.is_external and parallel.nnodes > 1:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} must not be given with --distributed-executor-backend "
            "external_launcher, because the launcher sets the number of nodes; remove it"
        )
    if parallel.cluster_key is None:
        raise ConfigError(
            "several machines need --cluster-key FILE; create the file with engine keygen and copy it to "
            "each machine"
        )
    load_cluster_key(parallel.cluster_key)
    last_port = parallel.master_port + 2 * parallel.data_parallel_size
    if last_port > MAX_PORT:
        raise ConfigError(
            f"--master-port {parallel.master_port} must be at most "
            f"{MAX_PORT - 2 * parallel.data_parallel_size}: the {2 * parallel.data_parallel_size} ports "
            "after it are also used"
        )
    return msgspec.structs.replace(parallel, cluster_key=os.path.abspath(parallel.cluster_key))


def _as_first_node(parallel: ParallelConfig) -> ParallelConfig:
    """Return the parallel configuration of node 0, with an address that node 0 can listen on."""
    if not parallel.is_distributed:
        return parallel
    if parallel.num_workers % parallel.num_nodes:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} must divide the number of workers, which is {parallel.num_workers} "
            f"(--tensor-parallel-size {parallel.tensor_parallel_size} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} x --data-parallel-size {parallel.data_parallel_size})"
        )
    return msgspec.structs.replace(parallel, master_addr=_resolve(parallel.master_addr))


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--master-addr {host!r} cannot be resolved: {error}; use a host name or an IP address"
        ) from None


def _encoder_outputs(model: ModelConfig) -> int:
    """Return the maximum number of outputs of one encoder call: for one tile, one audio clip or one text."""
    audio = 0 if model.chat_audio is None else model.chat_audio.outputs_per_window
    if model.audio is not None:
        return model.audio.max_source_positions
    if model.source_text is not None:
        return model.source_text.max_tokens
    if model.images is None:
        return audio
    largest = max(model.images.num_outputs, audio)
    if model.videos is not None:
        largest = max(largest, model.videos.max_outputs)
    if isinstance(model.images, MosaicProcessor):
        return largest
    # No image has more embeddings than the context has tokens.
    return min(largest, model.max_model_len)


def make_frontend_config(
    settings: Settings, default_sampling: dict[str, float | int] | None = None
) -> FrontendConfig:
    """Return the configuration of the frontend.

    `default_sampling` holds the sampling parameters that the model's generation config recommends.
    """
    return FrontendConfig(**settings["frontend"], default_sampling=default_sampling or {})


def _make_scheduler_config(
    settings: Settings,
    device: Device,
    num_stages: int,
    *,
    model: ModelConfig,
) -> SchedulerConfig:
    encoder_outputs, max_model_len = _encoder_outputs(model), model.max_model_len
    given: dict[str, Any] = dict(settings["scheduler"], num_micro_batches=num_stages)
    if model.diffusion is not None:
        diffusion.fit_scheduler(given, model.diffusion, num_stages, max_model_len)
    if model.is_encoder:
        given["speculative"] = None
    # If attention is bidirectional, the whole sequence and all of its images are computed in one step.
    chunks = not model.is_encoder and model.span_kind is not SpanKind.PROMPT
    is_alone = model.images is not None and model.images.stands_alone
    if not chunks:
        given["enable_chunked_prefill"] = False
    elif model.span_kind is not None:
        given["disable_chunked_mm_input"] = True
    if encoder_outputs and (chunks or is_alone) and (model.reads_source or not has_gpu(device)):
        # A CPU needs seconds to encode an image or an audio clip, and no request gets a token during that time.
        several = _SOURCES_AT_ONCE if model.reads_source and has_gpu(device) else 1
        given.setdefault("max_num_encoder_input_tokens", several * encoder_outputs)
    if model.audio is not None or model.reads_source:
        # Transcripts and translations are short, and repetitions in them do not predict what follows.
        given.setdefault("speculative", None)
    given["speculative"] = _speculation(given, device, num_stages, model.download_dir)
    if num_stages > 1 and given["speculative"] is not None:
        given["async_scheduling"] = False
    chunked = given.get("enable_chunked_prefill", True)
    limits = _default_limits(device, max_model_len)
    max_num_seqs = limits.max_num_seqs
    if model.audio is not None and model.audio.added is not None:
        if given["speculative"] is not None:
            raise ConfigError(
                "--speculative-config is not supported for models that read audio at every token; remove the flag"
            )
        max_num_seqs = min(max_num_seqs, _ADDED_CLIPS)
    given.setdefault("max_num_seqs", max_num_seqs)
    given.setdefault("prefill_step_ms", limits.prefill_step_ms)
    needed = max(given["max_num_seqs"], 0 if chunked else max_model_len)
    if model.diffusion is not None:
        needed = diffusion.count_step_tokens(model.diffusion, needed, max_model_len)
    if encoder_outputs and given.get("disable_chunked_mm_input"):
        # A step must have space for an image's tokens and one token of every other request.
        needed = max(needed, encoder_outputs + given["max_num_seqs"])
    most = most_tokens_with_states(given["hidden_states"], model, given["speculative"], device)
    num_tokens = max(min(limits.max_num_batched_tokens, most), needed)
    if given.setdefault("max_num_batched_tokens", num_tokens) > most:
        raise ConfigError(
            f"--max-num-batched-tokens {given['max_num_batched_tokens']} must be at most {most} with "
            "--hidden-states, because the states of a step are sent in one message"
        )
    if encoder_outputs:
        several = _KEPT_SOURCES if model.reads_source else 1
        step = max(given["max_num_batched_tokens"], encoder_outputs)
        given.setdefault("max_num_encoder_input_tokens", step)
        kept = max(step, _KEPT_EMBEDDINGS, several * encoder_outputs)
        given.setdefault("encoder_cache_size", kept)
    num_tasks = 1 if model.default_lora is None else len(model.loras)
    max_loras = given.setdefault("max_loras", max(limits.max_loras, num_tasks))
    max_cpu_loras = given.setdefault(
        "max_cpu_loras", max(max_loras, len(model.loras), _LOADED_LORAS)
    )
    if max_cpu_loras < max_loras:
        raise ConfigError(
            f"--max-cpu-loras {max_cpu_loras} must be at least --max-loras, which is {max_loras}; raise the "
            "first or lower the second"
        )
    config = SchedulerConfig(**given)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} must be at least "
            f"--max-num-seqs, which is {config.max_num_seqs}; raise the first or lower the second"
        )
    if not chunked and config.max_num_batched_tokens < max_model_len:
        why = (
            "when --no-enable-chunked-prefill is given"
            if chunks
            else "because this model reads a whole text in one step"
        )
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} must be at least --max-model-len, "
            f"which is {max_model_len}, {why}; raise the first or lower the second"
        )
    return config


def _default_limits(device: Device, max_model_len: int) -> SchedulerConfig:
    """Return the defaults. On a GPU they equal vLLM's."""
    if not has_gpu(device):
        # The duration of a CPU step grows with its tokens, so the limits for a CPU are lower.
        return SchedulerConfig(**cpu_defaults("scheduler"))
    limits = SchedulerConfig()
    if smallest_gpu_memory() < _LARGE_GPU_BYTES:
        return limits
    # Each sequence has room for the tokens of its maximum length.
    most = max(limits.max_num_seqs, min(_SEQS_OF_LARGE_GPU, _MOST_TOKEN_IDS // max_model_len))
    return SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=_STEP_OF_LARGE_GPU)


def _make_cache_config(
    settings: Settings, parallel: ParallelConfig, model: ResolvedModel, device: Device
) -> CacheConfig:
    given = dict(settings["cache"])
    given.pop("kv_transfer", None)
    depends = model.config.is_encoder or model.config.span_kind is SpanKind.PROMPT
    if depends or model.config.has_output_window:
        # The keys and values of a prefix depend on the tokens after it or on the end of the prompt.
        given["enable_prefix_caching"] = False
    if model.recurrent is not None and "block_size" not in given:
        dtype = model.config.dtype
        # Native programs on the CPU need the inputs of a recurrent state in float32.
        input_bytes = _BYTES.get(dtype, 2) if has_gpu(device) else 4
        kv_dtype = given.get("kv_cache_dtype", "auto")
        needed = model.recurrent.smallest_block_size(
            parallel.tensor_parallel_size,
            input_bytes,
            _BYTES.get(dtype if kv_dtype == "auto" else kv_dtype, 2),
        )
        # Take the smallest multiple that the kernels accept: a shared prefix can only end at the end of a block.
        unit = CacheConfig().block_size
        rounded = 1 << (needed - 1).bit_length() if has_gpu(device) else -(-needed // unit) * unit
        given["block_size"] = max(rounded, unit)
    if model.config.diffusion is not None:
        diffusion.fit_cache(given, model.config.diffusion)
    if isinstance(given.get("host_gib"), PerReplica):
        given["host_gib"] /= parallel.workers_per_core
    for name in ("disk_path", "encoder_disk_path"):
        if given.get(name) is not None:
            given[name] = os.path.abspath(os.path.expanduser(given[name]))
    return CacheConfig(**given)


def _check_prefix_hash(cache: CacheConfig) -> None:
    if cache.prefix_hash is PrefixHash.XXH3:
        try:
            import_module("xxhash")
        except ImportError as error:
            raise ConfigError(
                "--prefix-hash xxh3 needs the package xxhash; run pip install xxhash, or remove the flag"
            ) from error


def _check_cpu_offload(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    if cache.host_gib and not cache.enable_prefix_caching:
        raise ConfigError(
            f"--kv-host-gib {cache.host_gib:g} needs prefix caching, which --no-enable-prefix-caching "
            "disables; remove one of the two flags"
        )
    if scheduler.preemption_mode is PreemptionMode.SWAP and not cache.host_gib:
        raise ConfigError(
            "--preemption-mode swap needs CPU memory, but --kv-host-gib is 0; set it to a number of GiB"
        )


def _speculation(
    given: dict[str, Any], device: Device, num_stages: int, download_dir: str | None
) -> SpeculativeConfig | None:
    """Return the settings of speculative decoding: the given ones, or the default for this device.

    By default, speculation is enabled where it costs nothing on text without repetitions. On a GPU and with pipeline
    stages it has a cost: a step cannot be queued before the tokens of the previous step are known.
    """
    if "speculative" not in given:
        is_free = num_stages == 1 and not has_gpu(device) and device is not Device.NULL
        return DEFAULT_SPECULATION if is_free else None
    speculative: SpeculativeConfig | None = given["speculative"]
    if speculative is None:
        return None
    if device is Device.NULL:
        raise ConfigError(
            "--speculative-config needs a model that verifies drafts, and --device null has none; "
            "remove one of the two flags"
        )
    if num_stages > 1 and has_gpu(device):
        raise ConfigError(
            f"--speculative-config on GPUs needs --pipeline-parallel-size 1 (given: {num_stages}); remove "
            "one of the two flags"
        )
    if speculative.model is None:
        return speculative
    # These imports are slow, and other commands do not need them.
    from ..model_source.source import find_checkpoint
    from ..supervisor.console import Console

    options = ModelOptions(
        model=speculative.model, revision=speculative.revision, download_dir=download_dir
    )
    _, path = find_checkpoint(options, Console())
    method = speculative.method
    if method is ProposerMethod.DRAFT_MODEL:
        method = _method_of_checkpoint(Path(path)) or method
    return msgspec.structs.replace(
        speculative, method=method, model=os.path.abspath(path), revision=None
    )


_METHODS_OF_HEADS: Final = {
    "MuseGlimmerAssistant": ProposerMethod.DFLASH,
    "DFlash": ProposerMethod.DFLASH,
    "XPress": ProposerMethod.DFLASH,
    "Assistant": ProposerMethod.MTP,
    "DSpark": ProposerMethod.DFLASH,
    **dict.fromkeys(("Eagle3", "PEagle", "Peagle"), ProposerMethod.EAGLE3),
    "Eagle": ProposerMethod.EAGLE,
}
"""Parts of the names of architectures that are heads, for configurations without a method, as in vLLM."""


def _method_of_checkpoint(path: Path) -> ProposerMethod | None:
    """Return the method for a head in this directory; None for a draft model."""
    names = ConfigFields.read_if_present(path / "config.json").get("architectures") or []
    for part, method in _METHODS_OF_HEADS.items():
        if any(part in str(name) for name in names):
            return method
    return None


def _check_gpus(device: Device, parallel: ParallelConfig) -> None:
    """Raise ConfigError if there are fewer GPUs than workers, because each worker needs its own."""
    if has_gpu(device) and 0 < (num_gpus := count_gpus()) < parallel.num_local_workers:
        machines = f" on {parallel.nnodes} machines" if parallel.nnodes > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} x --data-parallel-size "
            f"{parallel.data_parallel_size}{machines} needs {parallel.num_local_workers} GPUs, one per "
            f"worker, but there are {num_gpus}; lower one of these flags or use --device cpu"
        )
