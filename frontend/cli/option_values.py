"""Parsers for the values of options, which are named in `OptionSpec.parse`.

Each parser returns the value. For an invalid text it raises ValueError with the text and the limit.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from ...protocol.config import (
    HiddenStatesConfig,
    KVEventsConfig,
    KVTransferConfig,
    MediaReading,
    ProposerMethod,
    ReplicaRole,
    SpeculativeConfig,
)
from ...protocol.config.diffusion import DenoisingConfig
from ...protocol.config.weights import WeightTransferConfig
from ...protocol.kv_transfer.direct import DIRECT_CONNECTOR, NIXL
from ...protocol.kv_transfer.store import DISK_CONNECTOR, LMCACHE_CONNECTOR

_INTEGER = re.compile(
    r"(?P<number>[+-]?\d+(?:\.\d+)?)\s*(?:(?P<unit>[kKmMgGtT])(?P<binary>i?)(?P<byte>B?))?"
)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_HTTP = ("http://", "https://")
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}

Number = TypeVar("Number", int, float)


class PerReplica(float):
    """A number that is given as the total of a replica's workers, while the configuration field is per worker."""


def parse_boolean(text: str) -> bool:
    """Return the value of true, yes, on, 1, false, no, off or 0, in upper or lower case."""
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError(f"must be true or false, got {text!r}")
    return value


def parse_integer(text: str, low: float | None, high: float | None) -> int:
    """Return an integer with an optional unit: 4k is 4000; 4K, 4Ki and 4KiB are 4096; 4KB is 4000."""
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be an integer, such as 4096, 32k or 4GiB, got {text!r}")
    unit = match["unit"] or ""
    if not unit and "." not in match["number"]:
        return _in_range(int(match["number"]), low, high)
    binary = bool(match["binary"]) or (unit.isupper() and not match["byte"])
    factor = (1024 if binary else 1000) ** _POWERS.get(unit.lower(), 0)
    value = float(match["number"]) * factor
    if value != int(value):
        raise ValueError(f"must be a whole number, got {text!r}")
    return _in_range(int(value), low, high)


def parse_number(text: str, low: float | None, high: float | None = None) -> float:
    """Return a finite number within the limits."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {text}")
    return _in_range(value, low, high)


def parse_list(text: str) -> list[str]:
    """Return the items of a JSON list of strings; any other text is one item."""
    if not re.match(r'\[\s*["\]]', text):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ValueError(f"must be a JSON list of strings: {error}") from None


def parse_object(text: str, type_: Any = dict[str, Any]) -> Any:
    """Return a JSON object, decoded as `type_`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object ({error}), got {text!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f'must be a JSON object such as {{"name": 1}}, got {text}')
    return _convert(value, type_)


def parse_entry(name: str, text: str, type_: Any) -> Any:
    """Return an object with one entry, whose value is JSON. It has none if the value is `auto`."""
    if text == "auto":
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"must be a number or another JSON value, got {text!r}") from None
    return _convert({name: value}, type_)


def _kv_events(text: str) -> KVEventsConfig | None:
    """Return the KV-event settings, or None if publishing is disabled.

    vLLM's fields `publisher` and `enable_kv_cache_events` are accepted as well.
    """
    fields = parse_object(text)
    if (publisher := fields.pop("publisher", "zmq")) != "zmq":
        raise ValueError(f'publisher must be "zmq", got {publisher!r}')
    if not fields.pop("enable_kv_cache_events", True):
        return None
    config: KVEventsConfig = _convert(fields, KVEventsConfig)
    return config


def _kv_transfer(text: str) -> KVTransferConfig:
    """Return the configuration of a KV connector.

    The names of vLLM's connectors select Engine's equivalent connector. vLLM's fields about memory buffers and ranks
    are accepted and ignored.
    """
    fields = _with_own_names(parse_object(text))
    if "kv_connector" not in fields:
        raise ValueError(f'needs a field such as {{"kv_connector": "direct"}}, got {text}')
    config: KVTransferConfig = _convert(fields, KVTransferConfig)
    return config


def _weight_transfer(text: str) -> WeightTransferConfig:
    """Return the settings of weights that a trainer sends."""
    fields = parse_object(text)
    if (backend := fields.get("backend", "nccl")) != "gloo":
        raise ValueError(f'backend must be "gloo", which also works with GPUs, got {backend!r}')
    config: WeightTransferConfig = _convert(fields, WeightTransferConfig)
    return config


def _with_own_names(fields: dict[str, Any]) -> dict[str, Any]:
    name = fields.get("kv_connector")
    if isinstance(name, str) and "kv_connector_module_path" not in fields:
        if name in _OTHER_CONNECTORS:
            raise ValueError(f"kv_connector {name!r} is not supported: {_OTHER_CONNECTORS[name]}")
        if name == "NixlConnector":
            fields = _with_nixl(fields)
        fields["kv_connector"] = own = _CONNECTORS.get(name, name)
        if own == LMCACHE_CONNECTOR and find_spec("lmcache") is None:
            raise ValueError(
                f"kv_connector {name!r} needs LMCache; install the extra engine-serve[lmcache], or use "
                "'disk' (--kv-disk DIRECTORY), which keeps blocks across restarts"
            )
    extra = fields.get("kv_connector_extra_config")
    if isinstance(extra, dict) and isinstance(extra.get("connectors"), list):
        children = [_with_own_names(child) for child in extra["connectors"] if child]
        fields["kv_connector_extra_config"] = {**extra, "connectors": children}
    return fields


def _with_nixl(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of vLLM's connector to NIXL as those of `direct`.

    Like vLLM, take the address for other engines from VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT.
    """
    if find_spec("nixl") is None:
        raise ValueError(
            "kv_connector 'NixlConnector' needs NIXL; install the extra engine-serve[nixl], or use "
            "'direct', which sends blocks over sockets"
        )
    host, port = (os.environ.get(f"VLLM_NIXL_SIDE_CHANNEL_{name}") for name in ("HOST", "PORT"))
    if host:
        fields.setdefault("kv_ip", host)
    if port:
        fields.setdefault("kv_port", parse_integer(port, 1, 65535))
    extra = fields.get("kv_connector_extra_config") or {}
    return {**fields, "kv_connector_extra_config": {"transport": NIXL, **extra}}


_CONNECTORS: Final = {
    "ExampleConnector": DISK_CONNECTOR,
    "LMCacheConnectorV1": LMCACHE_CONNECTOR,
    "NixlConnector": DIRECT_CONNECTOR,
    "SharedStorageConnector": DISK_CONNECTOR,
}
"""vLLM's name of a connector -> Engine's connector that does the same."""

_USE_DIRECT: Final = (
    "use 'direct' with a kv_port and --cluster-key; routers address it by the same "
    "kv_transfer_params"
)
_OTHER_CONNECTORS: Final = {
    "LMCacheMPConnector": f"Engine does not speak to LMCache's multi-process server; use {LMCACHE_CONNECTOR!r}, "
    "which runs LMCache in the workers",
    "MooncakeConnector": f"Engine does not use Mooncake; {_USE_DIRECT}",
    "P2pNcclConnector": f"its proxies write addresses into request IDs, which Engine does not read; {_USE_DIRECT}",
}
"""vLLM's name of a connector that has no equivalent in Engine -> what to use instead."""


def _replica_roles(text: str) -> tuple[ReplicaRole, ...]:
    roles: list[ReplicaRole] = []
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if name not in list(ReplicaRole):
            raise ValueError(f"has no role {name!r}; use {', '.join(ReplicaRole)}, got {text!r}")
        roles += [ReplicaRole(name)] * parse_integer(count or "1", 1, 256)
    return tuple(roles)


_DENOISING_SECTIONS: Final = ("sampler_config", "stopping_config", "temperature_schedule")


def _denoising_file(text: str) -> DenoisingConfig:
    """Return the settings in a YAML file, or in a JSON object, which may be in sections as for SGLang."""
    if text.startswith("{"):
        content: Any = parse_object(text)
    else:
        import yaml

        try:
            content = yaml.safe_load(Path(text).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read {text!r}: {error}") from None
    if isinstance(content, dict):
        sections = [content.pop(name, None) for name in _DENOISING_SECTIONS]
        for section in sections:
            content |= section if isinstance(section, dict) else {}
    config: DenoisingConfig = _convert(content, DenoisingConfig)
    return config


def _hidden_states(text: str) -> HiddenStatesConfig:
    states: HiddenStatesConfig = _convert(parse_object(text), HiddenStatesConfig)
    if not states.layers:
        return states
    # The order of the states is that of the layers, as in vLLM.
    return msgspec.structs.replace(states, layers=tuple(sorted(set(states.layers))))


def _extracted_states(fields: dict[str, Any]) -> HiddenStatesConfig:
    """Return the hidden states that vLLM's method `extract_hidden_states` extracts."""
    found: Any = fields
    for name in ("draft_model_config", "hf_config", "eagle_aux_hidden_state_layer_ids"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"method {EXTRACTS!r} needs the layers, such as "
            '{"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}}'
        )
    return _hidden_states(json.dumps({"layers": found}))


def _speculative(text: str) -> SpeculativeConfig | HiddenStatesConfig | None:
    """Return the settings of speculative decoding, or None if they disable it.

    vLLM's method `extract_hidden_states` proposes nothing. Its result are the hidden states that requests return.
    """
    fields = parse_object(text)
    if fields.get("method") == EXTRACTS:
        return _extracted_states(fields)
    for name, value in list(fields.items()):
        if name in _NEEDLESS:
            del fields[name]
        elif name in _LOSSLESS:
            if value not in (None, *_LOSSLESS[name]):
                allowed = " or ".join(map(json.dumps, (*_LOSSLESS[name], None)))
                raise ValueError(f"{name} must be {allowed}, got {json.dumps(value)}: {_EXACT}")
            del fields[name]
    method = fields.setdefault("method", "draft_model" if "model" in fields else "ngram")
    if isinstance(method, str):
        # vLLM's older method names contain the model family, such as deepseek_mtp.
        method = "mtp" if method.endswith("_mtp") else _METHODS.get(method, method)
        fields["method"] = method
    # This is checked before decoding, so that the error names the method instead of one of its fields.
    if method not in list(ProposerMethod):
        raise ValueError(
            f"method {method!r} is not supported; use one of {', '.join(ProposerMethod)}"
        )
    chosen = ProposerMethod(method)
    if (chosen.needs_checkpoint and "model" not in fields) or (
        "model" in fields and not chosen.may_have_checkpoint
    ):
        raise ValueError(
            "methods 'draft_model', 'eagle', 'eagle3' and 'dflash' need the field model (a draft model with the "
            "same tokenizer, or a head for this model), 'mtp' may have it (an assistant, or a file with the layer), and other methods "
            f"must not; got {text}"
        )
    if "revision" in fields and "model" not in fields:
        raise ValueError(f"revision needs the field model, got {text}")
    if chosen in _NUM_DRAFTS:
        fields.setdefault("num_speculative_tokens", _NUM_DRAFTS[chosen])
    config: SpeculativeConfig = _convert(fields, SpeculativeConfig)
    return config if config.num_speculative_tokens else None


EXTRACTS: Final = "extract_hidden_states"

_METHODS: Final = {"dspark": "dflash", "ngram_gpu": "ngram", "peagle": "eagle3"}
"""vLLM's name of a method -> Engine's method that does the same, or reads the same heads."""

_NUM_DRAFTS: Final = {
    ProposerMethod.SUFFIX: 16,
    ProposerMethod.DRAFT_MODEL: 5,
    ProposerMethod.EAGLE: 3,
    ProposerMethod.EAGLE3: 3,
    ProposerMethod.MTP: 1,
    ProposerMethod.DFLASH: 7,
}
"""The number of drafts of a configuration that does not say how many."""

_NEEDLESS: Final = frozenset(
    {
        *("attention_backend", "enforce_eager", "kv_cache_dtype", "max_model_len", "moe_backend"),
        *("code_revision", "draft_load_config", "quantization", "draft_lm_head_quantization"),
        *("disable_eagle_block_drop", "disable_lookahead_block_hashes"),
        *("disable_padded_drafter_batch", "index_share_for_mtp_iteration"),
        *("draft_sample_method", "enable_adaptive_verification", "parallel_drafting"),
        *("dspark_draft_topk", "xpress_topc", "prompt_lookup_max"),
        *("draft_tensor_parallel_size", "use_local_argmax_reduction"),
        "num_speculative_tokens_per_batch_size",
    }
)
"""Fields of vLLM that have no effect: they tune its kernels, or say what a checkpoint says or what is always so.

The longest match is always used, every rank runs the whole draft model or head, and the number of drafts follows the
batch size.
"""

_LOSSLESS: Final[dict[str, tuple[Any, ...]]] = {
    "rejection_sample_method": ("standard", "block"),
    "synthetic_acceptance_length": (),
    "synthetic_acceptance_rates": (),
    "use_heterogeneous_vocab": (False,),
}
"""Fields of vLLM -> the values that change no answer and need nothing that Engine does not have."""

_EXACT: Final = "drafts have the model's tokens and never change an answer; remove the field"


def _dotted_name(text: str) -> str:
    if "." not in text or not all(map(str.isidentifier, text.split("."))):
        raise ValueError(f"must be a dotted name such as package.module.Class, got {text!r}")
    return text


def _media_io(text: str) -> MediaReading:
    fields = parse_object(text)
    for kind in ("image", "audio"):
        if fields.get(kind) == {}:
            del fields[kind]
    reading: MediaReading = _convert(fields, MediaReading)
    video = reading.video
    if video.fps and (video.num_frames or -1) > 0:
        raise ValueError(f"video has num_frames and fps; use one of them, got {text}")
    return reading


def _mcp_servers(text: str) -> dict[str, str]:
    if find_spec("mcp") is None:
        raise ValueError(
            "tools of MCP servers need the library; install the extra engine-serve[mcp]"
        )
    if text.startswith("{"):
        servers: dict[str, Any] = parse_object(text)
    else:
        entries = (entry.partition("=") for entry in parse_list(text))
        servers = {label: url for label, _, url in entries}
    for label, url in servers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", label) or not str(url).startswith(_HTTP):
            raise ValueError(f"must be LABEL=URL with an HTTP URL, got {label!r} and {url!r}")
    return servers


def _dotted_names(text: str) -> tuple[str, ...]:
    return tuple(map(_dotted_name, parse_list(text)))


def _per_replica(text: str) -> PerReplica:
    return PerReplica(parse_number(text, 0))


def _existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(f"must be the path of an existing file, got {text!r}")
    return text


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(parse_list(text))
    for origin in origins:
        if origin not in ("auto", "localhost", "*", "null") and "://" not in origin:
            raise ValueError(f"must be an origin such as https://example.com, got {origin!r}")
    return origins


def _otlp_endpoint(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https", "grpc") or not url.netloc:
        raise ValueError(f"must be a URL such as http://localhost:4317, got {text!r}")
    packages = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto")
    try:
        is_installed = all(map(find_spec, packages))
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise ValueError("traces need OpenTelemetry; install the extra engine-serve[otel]")
    return text


def _api_keys_in_file(text: str) -> tuple[str, ...]:
    try:
        keys = Path(text).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {text!r}: {error}") from None
    if not keys:
        raise ValueError(f"{text!r} contains no API key; write one key per line")
    return tuple(keys)


def _idle_time(text: str) -> float | None:
    """Return seconds; None for `never`, and for -1 as in llama.cpp."""
    return None if text in ("never", "-1") else parse_number(text, 0)


PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "api_keys_in_file": _api_keys_in_file,
    "denoising_file": _denoising_file,
    "dotted_name": _dotted_name,
    "dotted_names": _dotted_names,
    "file": _existing_file,
    "hidden_states": _hidden_states,
    "idle_time": _idle_time,
    "kv_events": _kv_events,
    "kv_transfer": _kv_transfer,
    "mcp_servers": _mcp_servers,
    "media_io": _media_io,
    "origins": _origins,
    "otlp_endpoint": _otlp_endpoint,
    "per_replica": _per_replica,
    "replica_roles": _replica_roles,
    "speculative": _speculative,
    "weight_transfer": _weight_transfer,
}
"""`OptionSpec.parse` -> the parser, for syntaxes that a field's type does not imply."""


def _convert(value: object, type_: Any) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}, got {json.dumps(value)}") from None


def _in_range(value: Number, low: float | None, high: float | None) -> Number:
    if (low is not None and value < low) or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"must be {limit}, got {value}")
    return value
