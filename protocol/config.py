"""The configuration that every process of one engine shares.

The supervisor builds one `EngineConfig`, writes it into the run directory and every other process
reads it from there, so that no two processes can disagree.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final

import msgspec

from .errors import RunDirectoryError
from .file_identity import FileIdentity, verify_files

PROTOCOL_VERSION: Final = 7
"""Bumped whenever a message or this configuration changes its encoding."""

FIRST_EPOCH: Final = 1

CONFIG_FILE: Final = "config.msgpack"


class SchedulingPolicy(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"
    DEADLINE = "deadline"


class PreemptionMode(enum.StrEnum):
    """What becomes of a preempted request's blocks where there is a host tier.

    They are dropped, copied to the host at once, or copied when their memory is taken.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class PrefixHash(enum.StrEnum):
    """What blocks of the prefix cache are found by.

    `XXH3` is quicker, but collisions can be made on purpose: it is only for servers that trust all of their users.
    """

    SHA256 = "sha256"
    XXH3 = "xxh3"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    NULL = "null"


class CPUBackend(enum.StrEnum):
    """`AUTO` is native where it can run the model."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class LoadFormat(enum.StrEnum):
    """`AUTO` reads the checkpoint; `DUMMY` its config alone, and makes up the weights."""

    AUTO = "auto"
    DUMMY = "dummy"


class ModelConfig(msgspec.Struct, frozen=True):
    """What is served.

    `path` is the resolved checkpoint: a directory or a `.gguf` file. `tokenizer_path` is a directory with a
    tokenizer.json: the checkpoint's own, the one asked for, or the conversion of a GGUF file's; "" with
    `--skip-tokenizer-init`. `max_model_len` counts prompt plus output tokens. `eos_token_ids[0]` is the tokenizer's
    end; the others come from the generation config. `load_format` "dummy" takes random weights in place of the
    checkpoint's. `dtype` is that of weights that are not quantized; `quantization` ("int8" or "int4") quantizes them
    at load.
    `hf_overrides` are merged over the checkpoint's own configuration. `weight_files` and `tokenizer_files`, with the
    chat templates, are what was on disk when the server started.
    """

    model: str
    path: str
    tokenizer_path: str
    served_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "auto"
    load_format: LoadFormat = LoadFormat.AUTO
    quantization: str | None = None
    seed: int = 0
    hf_overrides: dict[str, object] = {}
    weight_files: tuple[FileIdentity, ...] = ()
    tokenizer_files: tuple[FileIdentity, ...] = ()

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer_path != ""

    def verified_tokenizer_path(self) -> str:
        """Return `tokenizer_path`. Raises CheckpointError if a file of it changed after the server started."""
        verify_files(self.tokenizer_files)
        return self.tokenizer_path


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where events of cached blocks are published (ZMQ PUB), and missed ones repeated (ROUTER).

    `buffer_steps` batches are kept for that; `hwm` messages wait for a slow subscriber before it loses some.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


class CacheConfig(msgspec.Struct, frozen=True):
    """How the KV cache is cut and how large it may be. `host_gib` is the host memory of each worker's second tier."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    num_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_events: KVEventsConfig | None = None
    host_gib: float = 0.0
    prefix_hash: PrefixHash = PrefixHash.SHA256


class ProposerMethod(enum.StrEnum):
    NGRAM = "ngram"
    EAGLE = "eagle"
    DRAFT_MODEL = "draft_model"


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What proposes tokens for the model to verify, and how many of them a step at most.

    By `ngram` it is what followed the last tokens where they came before, if `prompt_lookup_min` of them or more did.
    """

    num_speculative_tokens: int
    method: ProposerMethod = ProposerMethod.NGRAM
    prompt_lookup_min: int = 2

    @property
    def num_lookahead_tokens(self) -> int:
        """For so many positions after the computed ones the proposer writes KV entries."""
        return 0 if self.method is ProposerMethod.NGRAM else self.num_speculative_tokens


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The limits of one step and of the queue.

    0 means unbounded for the queue limits, those of a tenant and the partial prefills. `tenant_weights` are for the
    `fair` policy, 1 for a tenant not named. With `priority_preemption` a waiting request may displace running ones of
    lower priority. Requests of at most `max_loras` different adapters run at once. `max_num_encoder_input_tokens`
    embeddings are computed in a step and `encoder_cache_size` kept, 0 meaning as many as `max_num_batched_tokens`; with
    `disable_chunked_mm_input` the place of an encoder input is computed in one step. Decoding requests take turns in
    `num_micro_batches`, one for each stage of a pipeline. `scheduler_cls` is the dotted name of another scheduler
    class.
    """

    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int = 16384
    max_num_queued_tokens: int = 16 * 1024 * 1024
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    inject_preemption: float = 0.0
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    scheduler_delay_factor: float = 0.0
    priority_preemption: bool = False
    tenant_weights: dict[str, float] = {}
    max_loras: int = 1
    max_num_encoder_input_tokens: int = 0
    encoder_cache_size: int = 0
    disable_chunked_mm_input: bool = False
    max_num_seqs_per_tenant: int = 0
    max_num_queued_reqs_per_tenant: int = 0
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    num_micro_batches: int = 1
    speculative: SpeculativeConfig | None = None
    scheduler_cls: str | None = None

    @property
    def encoder_budget(self) -> int:
        """How many embeddings are computed in a step."""
        return self.max_num_encoder_input_tokens or self.max_num_batched_tokens

    @property
    def encoder_cache_capacity(self) -> int:
        """How many embeddings are kept."""
        return self.encoder_cache_size or self.max_num_batched_tokens

    @property
    def max_steps_in_flight(self) -> int:
        """One for each stage, and one more that is there when the first stage is free."""
        return self.num_micro_batches + self.async_scheduling


class LoadFailurePolicy(enum.StrEnum):
    RECOMPUTE = "recompute"
    FAIL = "fail"


class KVTransferConfig(msgspec.Struct, frozen=True):
    """Which KV connector moves blocks in and out.

    `kv_connector` is a registered name, or that of a class in `kv_connector_module_path`. Blocks that wait to be
    fetched are given up after `transfer_timeout_s`.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: dict[str, object] = {}
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    transfer_timeout_s: float = 480.0


class ExecutorBackend(enum.StrEnum):
    """How workers are started: by the supervisors of the nodes, or by torchrun and the like."""

    MP = "mp"
    EXTERNAL_LAUNCHER = "external_launcher"


class ParallelConfig(msgspec.Struct, frozen=True):
    """How many processes of each kind, and on which machines.

    A replica is one core with P x T workers; the workers of a stage have consecutive ranks. Workers are counted through
    all replicas, and each of `nnodes` nodes has equally many consecutive ones. Cores and frontends are on node 0, which
    the others reach at `master_addr`. With an external launcher each worker comes by itself, as a node of its own.
    `cluster_key` is the path of a key file, which several nodes need.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    api_server_count: int = 1
    nnodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    distributed_executor_backend: ExecutorBackend = ExecutorBackend.MP
    cluster_key: str | None = None

    @property
    def is_external(self) -> bool:
        return self.distributed_executor_backend is ExecutorBackend.EXTERNAL_LAUNCHER

    @property
    def is_distributed(self) -> bool:
        """Whether cores must be reached from other machines."""
        return self.nnodes > 1 or self.is_external

    @property
    def num_nodes(self) -> int:
        """The nodes that workers are on."""
        return self.num_workers if self.is_external else self.nnodes

    @property
    def num_remote_nodes(self) -> int:
        """The nodes that must join."""
        return self.num_nodes - (0 if self.is_external else 1)

    @property
    def workers_per_node(self) -> int:
        return self.num_workers // self.num_nodes

    @property
    def num_local_workers(self) -> int:
        """The workers on the machine of the cores and frontends."""
        return 0 if self.is_external else self.workers_per_node

    def node_of(self, worker: int) -> int:
        """The node of a worker, counted through all replicas."""
        return worker // self.workers_per_node

    def spans_nodes(self, core_index: int) -> bool:
        """Whether the workers of a replica are on several machines, or may be."""
        first = core_index * self.workers_per_core
        return self.is_external or self.node_of(first) != self.node_of(
            first + self.workers_per_core - 1
        )

    def shares_machine(self, core_index: int) -> bool:
        """Whether all workers of a core are on its machine."""
        last = (core_index + 1) * self.workers_per_core - 1
        return not self.is_external and self.node_of(last) == 0

    @property
    def node_address(self) -> str:
        """Where nodes join (ROUTER). The ports after it are those of the cores, then those of torch.distributed."""
        return self.master_address(0)

    def master_address(self, offset: int) -> str:
        """A TCP address of node 0."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port + offset}"

    @property
    def workers_per_core(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The worker of a replica that answers each step: the first of the last stage."""
        return self.workers_per_core - self.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.workers_per_core


class DeviceConfig(msgspec.Struct, frozen=True):
    """Where the model runs. `threads` 0 is every core, less one for the other processes on plain torch.

    On CUDA, steps of up to `max_cudagraph_capture_size` tokens are captured as graphs, unless `enforce_eager`, and with
    `batch_invariant` a token's numbers do not depend on its step, as they never do on the CPU.

    On the null device nothing is computed: a step takes `null_step_ms` and its tokens are made up.
    """

    device: Device = Device.AUTO
    threads: int = 0
    cpu_backend: CPUBackend = CPUBackend.AUTO
    null_step_ms: float = 10.0
    enforce_eager: bool = False
    max_cudagraph_capture_size: int = 512
    batch_invariant: bool = False


class FrontendConfig(msgspec.Struct, frozen=True):
    """The HTTP edge, and what every process does about its messages.

    A request without a deadline of its own has one after `default_deadline_s`, 0 meaning none. A client may take
    `slow_client_s` to send a request or to read on. With `admin_api_key` only who presents it may operate the server.
    All large bodies and their requests in one process have at most `max_request_memory` bytes together.
    With `log_stats` every core logs a line of statistics at that interval, while it has something to do.
    The event logs of the cores are written into `dump_dir`, or else into a private directory among the temporary ones.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    share_prefix_cache: bool = False
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ("auto",)
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    max_request_memory: int = 256 * 1024 * 1024
    max_logprobs: int = 20
    strict: bool = False
    keep_alive_s: float = 5.0
    slow_client_s: float = 30.0
    default_deadline_s: float = 0.0
    shutdown_timeout_s: float = 30.0
    response_role: str = "assistant"
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    special_tokens_in_text: str = "allow"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_prompt_tokens_details: bool = True
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    enable_tokenizer_info: bool = False
    stream_interval: int = 1
    log_requests: bool = False
    log_stats: bool = True
    log_stats_interval_s: float = 10.0
    metrics_compat: tuple[str, ...] = ()
    default_sampling: dict[str, float | int] = {}
    log_level: str = "info"
    dump_dir: str | None = None


class RecoveryConfig(msgspec.Struct, frozen=True):
    """When a process counts as hung, and how often one is started again.

    A process that gives no sign of life for `heartbeat_timeout_s`, or a step that takes longer than `step_timeout_s`,
    is killed. After more than `max_restarts` deaths with no token and no cause found in between the engine gives up,
    unless another replica or frontend serves. With `inject_crash` (tests) a worker kills itself when a prompt has that
    token.
    """

    heartbeat_timeout_s: float = 5.0
    step_timeout_s: float = 300.0
    max_restarts: int = 5
    inject_crash: int | None = None


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything. `run_dir` is a 0700 directory that holds the sockets of this engine.

    `epoch` is the one field that differs between processes: it counts the lives of a replica, or of a frontend, and a
    process is told on its command line in which it was born.
    """

    run_dir: str
    epoch: int
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    frontend: FrontendConfig = FrontendConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    kv_transfer: KVTransferConfig | None = None
    version: int = PROTOCOL_VERSION

    def core_address(self, core_index: int) -> str:
        """Where the frontends reach a core (ROUTER)."""
        return f"ipc://{self.run_dir}/core{core_index}"

    def worker_address(self, core_index: int) -> str:
        """Where the workers of a core reach it (ROUTER)."""
        if self.parallel.is_distributed:
            return self.parallel.master_address(1 + core_index)
        return f"ipc://{self.run_dir}/core{core_index}.workers"

    def step_log_path(self, core_index: int) -> str | None:
        """Where a core writes down what it sends, if it has several workers, and they can read it."""
        parallel = self.parallel
        if parallel.workers_per_core == 1 or not parallel.shares_machine(core_index):
            return None
        return f"{self.run_dir}/core{core_index}.steps"

    def supervisor_address(self) -> str:
        """Where every process reports its progress (PULL)."""
        return f"ipc://{self.run_dir}/supervisor"

    def status_address(self) -> str:
        """Where the supervisor tells the state of every process (PUB)."""
        return f"ipc://{self.run_dir}/status"

    def rendezvous_address(self, core_index: int) -> str:
        """`init_method` of torch.distributed for the workers of one core.

        What a dead worker left is not to be met. On one machine every epoch has a place of its own; on several the
        environment says where, and what is there ends with the first worker.
        """
        if self.parallel.spans_nodes(core_index):
            return "env://"
        return f"file://{self.run_dir}/core{core_index}.{self.epoch}.rendezvous"

    def rendezvous_port(self, core_index: int) -> int:
        """Where the first worker of a replica on several machines listens for the others."""
        return self.parallel.master_port + 1 + self.parallel.data_parallel_size + core_index

    def save(self) -> Path:
        """Write this into its run directory, readable by the owner only. Raises RunDirectoryError if it cannot."""
        path = Path(self.run_dir) / CONFIG_FILE
        try:
            path.touch(mode=0o600)
            path.write_bytes(msgspec.msgpack.encode(self))
        except OSError as error:
            raise RunDirectoryError(path, error.strerror) from None
        return path


def load_config(path: str | Path, epoch: int | None = None) -> EngineConfig:
    """Read what `EngineConfig.save` wrote, for a process of `epoch`. Raises msgspec.DecodeError on anything else."""
    config = msgspec.msgpack.decode(Path(path).read_bytes(), type=EngineConfig)
    if config.version != PROTOCOL_VERSION:
        raise msgspec.ValidationError(
            f"{path}: configuration version {config.version}, expected {PROTOCOL_VERSION}"
        )
    return config if epoch is None else msgspec.structs.replace(config, epoch=epoch)
