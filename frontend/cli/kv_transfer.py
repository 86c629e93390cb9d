"""Build the configuration of the KV connectors from `--kv-transfer-config`, `--kv-disk` and `--replica-roles`.

Also build that of hidden states that requests return, because vLLM configures their files as a connector.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ...protocol.config import (
    CacheConfig,
    Device,
    HiddenStatesConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    ReplicaRole,
    SpeculativeConfig,
)
from ...protocol.config.hidden_states import MAX_STEP_BYTES, STATES_CONNECTOR, StatesMode
from ...protocol.errors import ConfigError
from ...protocol.kv_transfer.direct import DIRECT_CONNECTOR, PullSettings
from ...protocol.kv_transfer.multi import MULTI_CONNECTOR, child_configs
from ...protocol.kv_transfer.store import DISK_CONNECTOR
from .arguments import Settings
from .option_values import EXTRACTS

HELD_S: Final = 60.0
"""Seconds for which a prefill replica keeps the blocks of a request that no other replica fetches."""


def make_kv_transfer(
    given: KVTransferConfig | None, cache: CacheConfig, parallel: ParallelConfig, device: Device
) -> tuple[KVTransferConfig | None, CacheConfig]:
    """Return the configuration of the KV connectors (None without any) and that of the cache.

    `given` is the value of `--kv-transfer-config`. `--kv-disk` and `--replica-roles` add one connector each. If a disk
    connector names a directory, the returned cache configuration has it.

    Raises:
        ConfigError: The settings contradict each other.
    """
    children = list(_flatten(given)) if given is not None else []
    if given is not None and not children:
        raise ConfigError("--kv-transfer-config has no connectors; add one, or remove the flag")
    cache = _with_disk(children, cache)
    names = [child.kv_connector for child in children]
    if parallel.replica_roles:
        _check_roles(parallel, names)
        if DIRECT_CONNECTOR not in names:
            children.insert(0, KVTransferConfig(DIRECT_CONNECTOR, transfer_timeout_s=HELD_S))
    if cache.disk_path is not None and DISK_CONNECTOR not in names:
        children.append(KVTransferConfig(DISK_CONNECTOR))
    if not children:
        return None, cache
    _check_support(children, cache, device)
    children = [_with_workers(child, parallel) for child in children]
    if len(children) == 1:
        return children[0], cache
    first = given or children[0]
    combined = msgspec.structs.replace(
        first,
        kv_connector=MULTI_CONNECTOR,
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": msgspec.to_builtins(children)},
    )
    return combined, cache


def with_hidden_states(settings: Settings) -> Settings:
    """Return the settings with `--hidden-states` in place of vLLM's method and connector that save hidden states.

    Raises:
        ConfigError: Only one of the two is given, or the connector's settings are invalid.
    """
    scheduler, cache = dict(settings["scheduler"]), dict(settings["cache"])
    states: HiddenStatesConfig | None = scheduler.get("hidden_states")
    extracts = isinstance(scheduler.get("speculative"), HiddenStatesConfig)
    if extracts:
        states = scheduler.pop("speculative")
    given: KVTransferConfig | None = cache.get("kv_transfer")
    children = [] if given is None else list(_flatten(given))
    own = [child for child in children if child.kv_connector == STATES_CONNECTOR]
    if own and (states is None or not states.layers):
        raise ConfigError(
            f"--kv-transfer-config: {STATES_CONNECTOR} needs the layers: --speculative-config with the method "
            f"{EXTRACTS!r} and eagle_aux_hidden_state_layer_ids"
        )
    if extracts and not own:
        raise ConfigError(
            f"--speculative-config: the method {EXTRACTS!r} needs --kv-transfer-config with the connector "
            f"{STATES_CONNECTOR}; for states in answers use --hidden-states"
        )
    if own and states is not None and given is not None:
        others = [child for child in children if child.kv_connector != STATES_CONNECTOR]
        extra = {"connectors": msgspec.to_builtins(others)}
        cache["kv_transfer"] = (
            msgspec.structs.replace(
                given, kv_connector=MULTI_CONNECTOR, kv_connector_extra_config=extra
            )
            if others
            else None
        )
        states = _with_directory(states, own[0].kv_connector_extra_config)
    if states is not None and states.directory is not None:
        directory = os.path.abspath(os.path.expanduser(states.directory))
        states = msgspec.structs.replace(states, directory=directory)
    return {**settings, "scheduler": scheduler | {"hidden_states": states}, "cache": cache}


def _with_directory(states: HiddenStatesConfig, extra: dict[str, object]) -> HiddenStatesConfig:
    """Return the hidden states with the settings of vLLM's connector."""
    names = ("allow_custom_save_path", "use_synchronization_lock")
    fields = {name: extra[name] for name in names if name in extra}
    fields["directory"] = extra.get("shared_storage_path", tempfile.gettempdir())
    try:
        return msgspec.convert(msgspec.to_builtins(states) | fields, HiddenStatesConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-transfer-config: kv_connector_extra_config: {error}") from None


def most_tokens_with_states(
    states: HiddenStatesConfig | None,
    model: ModelConfig,
    speculative: SpeculativeConfig | None,
    device: Device,
) -> int:
    """Return the maximum number of tokens of a step whose hidden states fit into a message.

    Raises:
        ConfigError: The model cannot return hidden states.
    """
    if states is None:
        return sys.maxsize
    if device is Device.NULL:
        raise ConfigError("--hidden-states needs a model, and --device null has none; remove it")
    if model.diffusion is not None or not model.generates:
        raise ConfigError(
            "--hidden-states needs a model that generates token by token; other models return the states of texts "
            "from /pooling with the task token_embed"
        )
    if states.layers and speculative is not None and speculative.method.reads_hidden_states:
        raise ConfigError(
            f"--hidden-states with layers cannot be used with --speculative-config with the method "
            f"{speculative.method.value!r}, which reads those of other layers; remove one of them"
        )
    if states.mode is StatesMode.LAST and not states.directory:
        return sys.maxsize
    return max(1, MAX_STEP_BYTES // (4 * max(1, states.row_size(model.hidden_size))))


def _flatten(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield the connectors of a configuration, in the order in which they are searched for blocks."""
    if config.kv_connector == MULTI_CONNECTOR and config.kv_connector_module_path is None:
        try:
            children = child_configs(config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-transfer-config: connectors: {error}") from None
        for child in children:
            yield from _flatten(child)
    else:
        yield config


def _with_disk(children: list[KVTransferConfig], cache: CacheConfig) -> CacheConfig:
    """Return the cache's configuration with the directory that the disk connector's settings name."""
    for child in children:
        if child.kv_connector != DISK_CONNECTOR:
            continue
        extra = child.kv_connector_extra_config
        path = extra.get("path", extra.get("shared_storage_path", cache.disk_path))
        gib = extra.get("gib", cache.disk_gib)
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f'--kv-transfer-config: the connector {DISK_CONNECTOR!r} needs kv_connector_extra_config {{"path": '
                '"DIRECTORY"}, or --kv-disk'
            )
        if not isinstance(gib, int | float) or gib <= 0:
            raise ConfigError(f"--kv-transfer-config: gib must be a positive number, got {gib!r}")
        cache = msgspec.structs.replace(
            cache, disk_path=os.path.abspath(os.path.expanduser(path)), disk_gib=float(gib)
        )
    return cache


def _with_workers(config: KVTransferConfig, parallel: ParallelConfig) -> KVTransferConfig:
    """Return a connector's configuration, completed with the fields that describe this engine."""
    extra = {
        **config.kv_connector_extra_config,
        "num_workers": parallel.workers_per_core,
        "tp_size": parallel.tensor_parallel_size,
    }
    engine_id = config.engine_id or f"{socket.gethostname()}-{os.getpid()}"
    return msgspec.structs.replace(config, kv_connector_extra_config=extra, engine_id=engine_id)


def _check_roles(parallel: ParallelConfig, names: list[str]) -> None:
    roles = ",".join(parallel.replica_roles)
    if not {ReplicaRole.PREFILL, ReplicaRole.DECODE} <= set(parallel.replica_roles):
        raise ConfigError(
            f"--replica-roles {roles} needs at least one prefill and one decode replica"
        )
    if parallel.is_distributed:
        raise ConfigError(
            "--replica-roles needs all replicas on one machine; across machines use --kv-transfer-config "
            "with a kv_port on each engine, and a proxy that sends kv_transfer_params"
        )
    if names and DIRECT_CONNECTOR not in names:
        raise ConfigError(
            f"--replica-roles {roles} needs the connector {DIRECT_CONNECTOR!r}, but --kv-transfer-config "
            f"has only {', '.join(names)}; add it, or remove one of the two flags"
        )


def _check_pull(config: KVTransferConfig) -> None:
    try:
        pull = msgspec.convert(config.kv_connector_extra_config, PullSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-transfer-config: kv_connector_extra_config: {error}") from None
    if pull.bidirectional_kv_xfer and not config.kv_port:
        raise ConfigError(
            "--kv-transfer-config: bidirectional_kv_xfer needs a kv_port, where servers that prefill fetch blocks"
        )


def _check_support(children: list[KVTransferConfig], cache: CacheConfig, device: Device) -> None:
    names: dict[str, Any] = dict.fromkeys(child.kv_connector for child in children)
    if len(names) < len(children):
        raise ConfigError(
            "--kv-transfer-config names a connector twice: "
            f"{', '.join(child.kv_connector for child in children)}; remove one of them"
        )
    for child in children:
        if child.kv_connector == DIRECT_CONNECTOR:
            _check_pull(child)
    flag = (
        f"--kv-disk {cache.disk_path}"
        if list(names) == [DISK_CONNECTOR]
        else f"the KV connector {', '.join(names)}"
    )
    if not cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} needs prefix caching, which is disabled or not supported for this model; remove the flag"
        )
    if device is Device.NULL:
        raise ConfigError(
            f"{flag} needs a KV cache, and --device null has none; remove one of the two flags"
        )
