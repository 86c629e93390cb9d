"""The configuration of the KV cache, of its events, and of the connectors that move its blocks."""

import enum
from typing import Annotated, Literal

import msgspec

from .option import option

KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"]


class PrefixHash(enum.StrEnum):
    """The hash function that identifies blocks in the prefix cache.

    `XXH3` is faster, but an attacker can construct collisions. Use it only if all users of the server are trusted.
    """

    SHA256 = "sha256"
    XXH3 = "xxh3"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The publisher of events about cached KV blocks.

    Attributes:
        endpoint: The address of the events (ZMQ PUB).
        replay_endpoint: The address at which subscribers request batches that they missed (ROUTER); None for none.
        buffer_steps: The number of batches that are kept for these requests.
        hwm: The number of messages that may wait for a slow subscriber; newer messages are dropped.
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
    """The KV connector that loads and stores blocks of the KV cache.

    Attributes:
        kv_connector: A registered name, or the name of a class in `kv_connector_module_path`.
        kv_role: `kv_producer` computes blocks for others, `kv_consumer` loads them, `kv_both` does both.
        kv_connector_extra_config: Settings that are passed to the connector unchanged.
        engine_id: The name by which other engines address this one.
        kv_ip: The address at which other engines reach the workers. It has no effect without `kv_port`.
        kv_port: The port of the first worker. The other workers use the ports after it.
        transfer_timeout_s: Seconds after which blocks that no engine fetched are released.
        load_timeout_s: Seconds after which a request whose blocks are not loaded is computed instead.
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
    load_timeout_s: float = 60.0


class CacheConfig(msgspec.Struct, frozen=True):
    """The size, element type and memory of the KV cache."""

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
        float,
        option(
            "Fraction of device memory to use",
            "--mem-fraction-static --device-memory-utilization",
            ge=0.01,
            le=1,
        ),
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
            "Maximum size of the --kv-disk directory, in GiB",
            name="--kv-disk-gib",
            metavar="GIB",
            ge=0.001,
        ),
    ] = 10.0
    encoder_disk_path: Annotated[
        str | None,
        option(
            "Directory for the outputs of the encoder of images and audio",
            name="--encoder-disk",
            metavar="PATH",
        ),
    ] = None
    encoder_disk_gib: Annotated[
        float,
        option(
            "Maximum size of the --encoder-disk directory, in GiB",
            name="--encoder-disk-gib",
            metavar="GIB",
            ge=0.001,
        ),
    ] = 10.0
    kv_transfer: Annotated[
        KVTransferConfig | None,
        option(
            "KV connector that loads and stores blocks: {kv_connector, kv_role, …}",
            name="--kv-transfer-config",
            parse="kv_transfer",
        ),
    ] = None
    prefix_hash: Annotated[
        PrefixHash,
        option(
            "Hash function for prefix blocks; xxh3 is faster, only for trusted users",
            "--prefix-caching-hash-algo",
            synonyms={"xxhash": "xxh3"},
        ),
    ] = PrefixHash.SHA256
