"""The KV cache, and the connectors that move its blocks."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from .option import option

KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"]


class PrefixHash(enum.StrEnum):
    """The hash that finds blocks of the prefix cache.

    `XXH3` is faster, but collisions can be made on purpose, so it is only for servers that trust all of their users.
    """

    SHA256 = "sha256"
    XXH3 = "xxh3"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address at which events of cached blocks are published.

    Attributes:
        endpoint: Address that subscribers connect to (ZMQ PUB).
        replay_endpoint: Address that repeats missed batches (ROUTER).
        buffer_steps: Number of batches that are kept for it.
        hwm: Number of messages that wait for a slow subscriber before it loses some.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


class LoadFailurePolicy(enum.StrEnum):
    """The treatment of a request whose blocks a KV connector could not load.

    `RECOMPUTE` computes the missing tokens; `FAIL` fails the request.
    """

    RECOMPUTE = "recompute"
    FAIL = "fail"


class KVTransferConfig(msgspec.Struct, frozen=True):
    """The KV connector that moves blocks in and out.

    Attributes:
        kv_connector: A registered name, or the name of a class in `kv_connector_module_path`.
        kv_role: `kv_producer` computes blocks for others, `kv_consumer` loads them, `kv_both` does both.
        kv_connector_extra_config: Settings that only the connector knows.
        engine_id: The name of this engine for others.
        kv_ip: The address at which other engines reach the workers, if there is a `kv_port`.
        kv_port: The port of the first worker; those of the others follow it.
        transfer_timeout_s: Blocks that wait longer than this to be fetched are released.
    """

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, object] = {}
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    engine_id: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    transfer_timeout_s: float = 480.0


class CacheConfig(msgspec.Struct, frozen=True):
    """The blocks of the KV cache, and how much memory they may use."""

    block_size: Annotated[
        int,
        option(
            "Tokens per KV-cache block",
            "--page-size",
            ge=1,
            le=65536,
            default_text="16; more if a recurrent state needs it",
        ),
    ] = 16
    gpu_memory_utilization: Annotated[
        float, option("Fraction of device memory to use", "--mem-fraction-static", ge=0.01, le=1)
    ] = 0.9
    kv_cache_memory_bytes: (
        Annotated[
            int, option("KV-cache size, such as 4GiB, instead of --gpu-memory-utilization", ge=1)
        ]
        | None
    ) = None
    kv_cache_dtype: Annotated[
        KVCacheDtype, option("Element type of the KV cache; auto follows --dtype")
    ] = "auto"
    num_blocks_override: (
        Annotated[
            int,
            option(
                "Number of KV-cache blocks, regardless of available memory",
                name="--num-gpu-blocks-override",
                ge=2,
            ),
        ]
        | None
    ) = None
    enable_prefix_caching: Annotated[
        bool,
        option("Reuse cached KV blocks of shared prompt prefixes"),
        option(
            "SGLang's name for --no-enable-prefix-caching",
            name="--disable-radix-cache",
            value=False,
        ),
    ] = True
    kv_events: Annotated[
        KVEventsConfig | None,
        option(
            "Publish KV-cache events: {endpoint, replay_endpoint, buffer_steps, hwm, topic}",
            name="--kv-events-config",
            parse="kv_events",
        ),
    ] = None
    host_gib: Annotated[
        float,
        option(
            "CPU memory per worker for KV offload, in GiB",
            "--swap-space",
            name="--kv-host-gib",
            metavar="GIB",
            ge=0,
        ),
        option(
            "CPU memory per replica for KV offload, in GiB",
            name="--kv-offloading-size",
            metavar="GIB",
            parse="per_replica",
        ),
    ] = 0.0
    disk_path: Annotated[
        str | None,
        option(
            "Directory for a KV cache on disk, which survives restarts",
            name="--kv-disk",
            metavar="PATH",
        ),
    ] = None
    disk_gib: Annotated[
        float,
        option(
            "Maximum size of the directory of --kv-disk, in GiB",
            name="--kv-disk-gib",
            metavar="GIB",
            ge=0.001,
        ),
    ] = 10.0
    kv_transfer: Annotated[
        KVTransferConfig | None,
        option(
            "KV connector that moves blocks in and out: {kv_connector, kv_role, …}",
            name="--kv-transfer-config",
            parse="kv_transfer",
        ),
    ] = None
    prefix_hash: Annotated[
        PrefixHash,
        option(
            "Hash of prefix blocks; xxh3 is faster, only for trusted users",
            "--prefix-caching-hash-algo",
            synonyms={"xxhash": "xxh3"},
        ),
    ] = PrefixHash.SHA256
