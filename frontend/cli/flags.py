"""The flags of `engine serve`, as data.

Each flag sets one field of `ModelOptions`, `NodeOptions` or a section of `EngineConfig`, and takes that field's
default. Flag names follow vLLM where vLLM has the flag. Aliases are the names that SGLang, TensorRT-LLM and llama.cpp
use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...protocol.config import ExecutorBackend
from ..model_source.options import CHECKPOINT_QUANTIZATIONS
from .flag_values import (
    api_keys_in_file,
    dotted_name,
    dtype,
    existing_file,
    integer,
    json_object,
    kv_events,
    model_length,
    number,
    per_replica,
    prefix_hash,
    size,
    speculative,
    text_or_json_list,
)

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line and the configuration field that it sets.

    Attributes:
        names: All names, separated by spaces. Help shows the first one.
        type: Parses the value. `bool` also creates the `--no-…` form.
        const: The value to store for a flag that takes no value. Help shows no default for it.
        many: Whether the flag takes several values at once.
        default_text: Replaces the default in help where the field's own default would mislead.
    """

    names: str
    field: str
    help: str
    type: Callable[[str], Any] = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    const: object = None
    many: bool = False
    default_text: str = ""


FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag(
            "--model --model-path -m", "model.model", "Same as the MODEL argument", metavar="MODEL"
        ),
        Flag(
            "--served-model-name --alias",
            "model.served_model_name",
            "Names that clients may use; responses show the first",
            metavar="NAME",
            many=True,
        ),
        Flag(
            "--tokenizer",
            "model.tokenizer",
            "Tokenizer directory or hub repository, if not the model's",
            metavar="PATH",
        ),
        Flag(
            "--skip-tokenizer-init",
            "model.skip_tokenizer_init",
            "Serve without a tokenizer: prompts and answers are token ids",
            bool,
        ),
        Flag("--revision", "model.revision", "Hub branch, tag or commit"),
        Flag(
            "--download-dir",
            "model.download_dir",
            "Directory for downloaded models instead of the default cache",
            metavar="DIR",
        ),
        Flag(
            "--dtype",
            "model.dtype",
            "Type of unquantized weights: auto, float32, float16 (half) or bfloat16",
            dtype,
            metavar="DTYPE",
        ),
        Flag(
            "--load-format",
            "model.load_format",
            "Weights to load; dummy uses random weights",
            choices=("auto", "dummy"),
        ),
        Flag(
            "--quantization -q",
            "model.quantization",
            "int8 and int4 quantize at load (CPU); others must match the checkpoint",
            choices=("int8", "int4", *CHECKPOINT_QUANTIZATIONS),
        ),
        Flag(
            "--seed",
            "model.seed",
            "Default seed for requests that set none; 0 picks random ones",
            integer(0, MAX_SEED),
        ),
        Flag(
            "--max-model-len --context-length --ctx-size --max-seq-len -c",
            "model.max_model_len",
            "Maximum prompt plus output tokens; 32k is 32000, 32K is 32768",
            model_length,
            metavar="N",
            default_text="auto",
        ),
        Flag(
            "--hf-overrides",
            "model.hf_overrides",
            "Fields that replace those of the model's config.json",
            json_object,
            metavar="JSON",
        ),
        Flag(
            "--generation-config",
            "model.generation_config",
            "Sampling defaults: auto (the model's), vllm (none) or a path",
            metavar="SOURCE",
        ),
        Flag(
            "--override-generation-config",
            "model.override_generation_config",
            "Sampling defaults that override --generation-config; max_new_tokens caps every request",
            json_object,
            metavar="JSON",
        ),
    ),
    "server": (
        Flag("--host", "frontend.host", "Address to listen on; 0.0.0.0 is every interface"),
        Flag("--port", "frontend.port", "Port to listen on; 0 picks a free one", integer(0, 65535)),
        Flag("--uds", "frontend.uds", "Unix socket to listen on instead of TCP", metavar="PATH"),
        Flag(
            "--api-key",
            "frontend.api_keys",
            "API keys that clients must send; $ENGINE_API_KEY if not given",
            metavar="KEY",
            many=True,
        ),
        Flag(
            "--api-key-file",
            "frontend.api_keys",
            "File with one API key per line",
            api_keys_in_file,
            metavar="FILE",
        ),
        Flag(
            "--admin-api-key",
            "frontend.admin_api_key",
            "Key required for operator routes; $ENGINE_ADMIN_API_KEY if not given",
            metavar="KEY",
        ),
        Flag(
            "--share-prefix-cache",
            "frontend.share_prefix_cache",
            "Share cached prefixes between API keys (timing can reveal others' prompts)",
            bool,
        ),
        Flag("--root-path", "frontend.root_path", "URL path prefix that a reverse proxy removes"),
        Flag(
            "--ssl-keyfile",
            "frontend.ssl_keyfile",
            "Private key file for HTTPS",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--ssl-certfile",
            "frontend.ssl_certfile",
            "Certificate chain file for HTTPS",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--allowed-origins",
            "frontend.allowed_origins",
            "Origins of web pages that may call the API",
            text_or_json_list,
            metavar="ORIGIN",
            default_text="auto: any; on a loopback address only local pages",
        ),
        Flag(
            "--allowed-hosts",
            "frontend.allowed_hosts",
            "Host header values to accept; * accepts any",
            metavar="NAME",
            many=True,
            default_text="any; only local names on a loopback address without API keys",
        ),
        Flag(
            "--api-server-count",
            "parallel.api_server_count",
            "Frontend processes that share the port",
            integer(1, 256),
        ),
        Flag(
            "--max-body-bytes",
            "frontend.max_body_bytes",
            "Maximum size of a request body, such as 32MiB",
            size(1024),
        ),
        Flag(
            "--max-request-memory",
            "frontend.max_request_memory",
            "Memory for large requests in each frontend process, such as 256MiB",
            size(1024),
        ),
        Flag(
            "--max-logprobs",
            "frontend.max_logprobs",
            "Maximum logprobs per token in a request; -1: unlimited",
            integer(-1),
        ),
        Flag("--strict", "frontend.strict", "Reject requests with unknown fields", bool),
        Flag(
            "--timeout-keep-alive",
            "frontend.keep_alive_s",
            "Seconds before an idle connection is closed",
            number(0),
        ),
        Flag(
            "--timeout-slow-client",
            "frontend.slow_client_s",
            "Seconds a client may take to send or read",
            number(1, 86400),
        ),
        Flag(
            "--default-deadline",
            "frontend.default_deadline_s",
            "Deadline in seconds for requests without X-Request-Timeout; 0: none",
            number(0),
        ),
        Flag(
            "--shutdown-timeout",
            "frontend.shutdown_timeout_s",
            "Seconds that running requests may take to finish during shutdown",
            number(0),
        ),
        Flag(
            "--stream-interval",
            "frontend.stream_interval",
            "Tokens per event of a streamed response",
            integer(1),
        ),
        Flag(
            "--enable-prompt-tokens-details",
            "frontend.enable_prompt_tokens_details",
            "Report cached prompt tokens in usage",
            bool,
        ),
        Flag(
            "--enable-force-include-usage",
            "frontend.force_include_usage",
            "End every stream with usage, even without stream_options.include_usage",
            bool,
        ),
        Flag(
            "--return-tokens-as-token-ids",
            "frontend.return_tokens_as_token_ids",
            "Write tokens in logprobs as token_id:N unless a request overrides it",
            bool,
        ),
        Flag(
            "--enable-tokenizer-info-endpoint",
            "frontend.enable_tokenizer_info",
            "Serve tokenizer configuration and chat template at GET /tokenizer_info",
            bool,
        ),
    ),
    "chat": (
        Flag(
            "--chat-template",
            "frontend.chat_template",
            "Chat template or a file with one, replacing the model's",
            metavar="TEMPLATE",
        ),
        Flag(
            "--chat-template-content-format",
            "frontend.chat_template_content_format",
            "Format in which the chat template receives message content",
            choices=("auto", "string", "openai"),
        ),
        Flag(
            "--special-tokens-in-text",
            "frontend.special_tokens_in_text",
            "Whether special tokens in messages are interpreted, escaped or refused",
            choices=("allow", "escape", "refuse"),
        ),
        Flag(
            "--tool-call-parser",
            "frontend.tool_call_parser",
            "Format of tool calls: hermes, qwen3, llama3_json, llama4_json, mistral, granite, pythonic, llama4_pythonic",
            metavar="NAME",
        ),
        Flag(
            "--reasoning-parser",
            "frontend.reasoning_parser",
            "Format of the model's reasoning: deepseek_r1, qwen3, granite",
            metavar="NAME",
        ),
        Flag("--response-role", "frontend.response_role", "Role of response messages"),
    ),
    "scheduler": (
        Flag(
            "--max-num-seqs --max-running-requests --max-batch-size --parallel -np",
            "scheduler.max_num_seqs",
            "Maximum requests that run at once in each replica",
            integer(1, 65536),
            default_text="256; 64 on a CPU",
        ),
        Flag(
            "--max-num-batched-tokens --chunked-prefill-size --max-num-tokens",
            "scheduler.max_num_batched_tokens",
            "Maximum tokens per step",
            size(1),
            default_text="2048; 512 on a CPU",
        ),
        Flag(
            "--max-num-queued-reqs --max-queued-requests",
            "scheduler.max_num_queued_reqs",
            "Maximum waiting requests per replica; 0: unlimited",
            integer(0),
        ),
        Flag(
            "--max-num-queued-tokens",
            "scheduler.max_num_queued_tokens",
            "Maximum waiting prompt tokens per replica; 0: unlimited",
            size(0),
        ),
        Flag(
            "--max-num-seqs-per-tenant",
            "scheduler.max_num_seqs_per_tenant",
            "Maximum running requests per tenant and replica; 0: unlimited",
            integer(0),
        ),
        Flag(
            "--max-num-queued-reqs-per-tenant",
            "scheduler.max_num_queued_reqs_per_tenant",
            "Maximum waiting requests per tenant and replica; 0: unlimited",
            integer(0),
        ),
        Flag(
            "--scheduling-policy --schedule-policy",
            "scheduler.policy",
            "Order in which waiting requests are admitted",
            choices=("fcfs", "priority", "fair", "deadline"),
        ),
        Flag(
            "--scheduler-cls",
            "scheduler.scheduler_cls",
            "Scheduler class that replaces the built-in one",
            dotted_name,
            metavar="MODULE.CLASS",
        ),
        Flag(
            "--priority-preemption",
            "scheduler.priority_preemption",
            "With the priority policy, preempt running requests of lower priority",
            bool,
        ),
        Flag(
            "--tenant-weights",
            "scheduler.tenant_weights",
            "Shares of tenants under the fair policy; others have 1",
            json_object,
            metavar="JSON",
        ),
        Flag(
            "--max-num-partial-prefills",
            "scheduler.max_num_partial_prefills",
            "Maximum prompts prefilled in chunks at once; 0: unlimited",
            integer(0),
        ),
        Flag(
            "--max-long-partial-prefills",
            "scheduler.max_long_partial_prefills",
            "Maximum partial prefills over --long-prefill-token-threshold at once; 0: unlimited",
            integer(0),
        ),
        Flag(
            "--scheduler-delay-factor",
            "scheduler.scheduler_delay_factor",
            "Delay between admissions, as a multiple of the prefill time",
            number(0, 1000),
            metavar="FACTOR",
        ),
        Flag(
            "--long-prefill-token-threshold",
            "scheduler.long_prefill_token_threshold",
            "Maximum tokens of one prompt per step; 0: unlimited",
            size(0),
        ),
        Flag(
            "--enable-chunked-prefill",
            "scheduler.enable_chunked_prefill",
            "Split long prompts over several steps, batched with other requests' tokens",
            bool,
        ),
        Flag(
            "--async-scheduling",
            "scheduler.async_scheduling",
            "Schedule the next step before the current one ends",
            bool,
        ),
        Flag(
            "--preemption-mode",
            "scheduler.preemption_mode",
            "What to do with the KV blocks of preempted requests",
            choices=("recompute", "swap", "auto"),
        ),
        Flag(
            "--speculative-config",
            "scheduler.speculative",
            "Draft tokens from repeated text without changing output; 0 tokens disables",
            speculative,
            metavar="JSON",
            default_text='{"num_speculative_tokens": 8, "prompt_lookup_min": 2}; off on a GPU or with -pp',
        ),
        Flag(
            "--inject-preemption",
            "scheduler.inject_preemption",
            "For tests: probability of a random preemption in each step",
            number(0, 1),
            metavar="P",
        ),
    ),
    "KV cache": (
        Flag(
            "--block-size --page-size",
            "cache.block_size",
            "Tokens per KV-cache block",
            integer(1, 1024),
        ),
        Flag(
            "--gpu-memory-utilization --mem-fraction-static",
            "cache.gpu_memory_utilization",
            "Fraction of device memory to use",
            number(0.01, 1),
            metavar="SHARE",
        ),
        Flag(
            "--kv-cache-memory-bytes",
            "cache.kv_cache_memory_bytes",
            "KV-cache size, such as 4GiB, instead of --gpu-memory-utilization",
            size(1),
        ),
        Flag(
            "--kv-cache-dtype",
            "cache.kv_cache_dtype",
            "Element type of the KV cache; auto follows --dtype",
            choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"),
        ),
        Flag(
            "--num-gpu-blocks-override",
            "cache.num_blocks_override",
            "Number of KV-cache blocks, regardless of available memory",
            integer(2),
        ),
        Flag(
            "--enable-prefix-caching",
            "cache.enable_prefix_caching",
            "Reuse cached KV blocks of shared prompt prefixes",
            bool,
        ),
        Flag(
            "--prefix-hash --prefix-caching-hash-algo",
            "cache.prefix_hash",
            "Hash of prefix blocks; xxh3 is faster, only for trusted users",
            prefix_hash,
            metavar="HASH",
        ),
        Flag(
            "--kv-host-gib --swap-space",
            "cache.host_gib",
            "CPU memory per worker for KV offload, in GiB",
            number(0),
            metavar="GIB",
        ),
        Flag(
            "--kv-offloading-size",
            "cache.host_gib",
            "CPU memory per replica for KV offload, in GiB",
            per_replica,
            metavar="GIB",
        ),
        Flag(
            "--disable-radix-cache",
            "cache.enable_prefix_caching",
            "SGLang's name for --no-enable-prefix-caching",
            const=False,
        ),
        Flag(
            "--kv-events-config",
            "cache.kv_events",
            "Publish KV-cache events: {endpoint, replay_endpoint, buffer_steps, hwm, topic}",
            kv_events,
            metavar="JSON",
        ),
    ),
    "recovery": (
        Flag(
            "--heartbeat-timeout",
            "recovery.heartbeat_timeout_s",
            "Seconds without a heartbeat before a process is killed and restarted",
            number(1),
            metavar="S",
        ),
        Flag(
            "--step-timeout",
            "recovery.step_timeout_s",
            "Maximum seconds of a step before its worker is restarted",
            number(1),
            metavar="S",
        ),
        Flag(
            "--max-restarts",
            "recovery.max_restarts",
            "Consecutive unexplained crashes allowed before exit, unless another replica serves",
            integer(0),
            metavar="N",
        ),
        Flag(
            "--inject-crash",
            "recovery.inject_crash",
            "For tests: crash the worker when a prompt contains this token",
            integer(0),
            metavar="TOKEN",
        ),
    ),
    "device": (
        Flag(
            "--device",
            "device.device",
            "Where the model runs; null generates random tokens without a model",
            choices=("auto", "cpu", "cuda", "null"),
        ),
        Flag(
            "--threads -t",
            "device.threads",
            "CPU threads per worker; 0 uses every allowed core",
            integer(0, 4096),
        ),
        Flag(
            "--cpu-backend",
            "device.cpu_backend",
            "CPU kernels; auto prefers native and falls back to torch",
            choices=("auto", "native", "torch"),
        ),
        Flag(
            "--enforce-eager",
            "device.enforce_eager",
            "Disable CUDA graphs (faster startup, slower steps)",
            bool,
        ),
        Flag(
            "--max-cudagraph-capture-size --cuda-graph-max-bs",
            "device.max_cudagraph_capture_size",
            "Maximum tokens of a captured CUDA graph; 0: none",
            integer(0, 65536),
        ),
        Flag(
            "--batch-invariant --enable-deterministic-inference",
            "device.batch_invariant",
            "Use batch-invariant GPU kernels (slower)",
            bool,
        ),
        Flag(
            "--null-step-ms",
            "device.null_step_ms",
            "Duration of a step on the null device, in milliseconds",
            number(0, 3_600_000),
            metavar="MS",
        ),
    ),
    "parallelism": (
        Flag(
            "--tensor-parallel-size --tp --tp-size -tp",
            "parallel.tensor_parallel_size",
            "Workers that split each layer",
            integer(1, 1024),
        ),
        Flag(
            "--pipeline-parallel-size --pp --pp-size -pp",
            "parallel.pipeline_parallel_size",
            "Pipeline stages that the layers are divided into",
            integer(1, 1024),
        ),
        Flag(
            "--data-parallel-size --dp --dp-size -dp",
            "parallel.data_parallel_size",
            "Model replicas, each with its own KV cache",
            integer(1, 256),
        ),
    ),
    "several machines": (
        Flag(
            "--nnodes -n",
            "parallel.nnodes",
            "Machines that share the workers equally; each runs engine serve",
            integer(1, 1024),
        ),
        Flag(
            "--node-rank -r",
            "node.node_rank",
            "Rank of this machine; 0 serves the API, others need --headless",
            integer(0, 1023),
        ),
        Flag(
            "--headless",
            "node.headless",
            "Run only workers on this machine, for node ranks above 0",
            const=True,
        ),
        Flag(
            "--master-addr",
            "parallel.master_addr",
            "Address at which other machines reach node 0",
            metavar="HOST",
        ),
        Flag(
            "--master-port",
            "parallel.master_port",
            "First port on node 0; two more follow per replica",
            integer(1, 65535),
        ),
        Flag(
            "--cluster-key --key",
            "parallel.cluster_key",
            "Key file from engine keygen, the same on every machine",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--distributed-executor-backend",
            "parallel.distributed_executor_backend",
            "Who starts workers: mp is engine serve; external_launcher is torchrun",
            choices=tuple(ExecutorBackend),
        ),
    ),
    "logging": (
        Flag(
            "--log-level --uvicorn-log-level",
            "frontend.log_level",
            "Least severe messages to log",
            choices=("debug", "info", "warning", "error", "critical"),
        ),
        Flag("--enable-log-requests", "frontend.log_requests", "Log every request", bool),
        Flag(
            "--disable-log-requests",
            "frontend.log_requests",
            "vLLM's name for --no-enable-log-requests",
            const=False,
        ),
        Flag(
            "--log-stats",
            "frontend.log_stats",
            "Periodically log statistics while requests are running",
            bool,
        ),
        Flag(
            "--disable-log-stats",
            "frontend.log_stats",
            "vLLM's name for --no-log-stats",
            const=False,
        ),
        Flag(
            "--log-stats-interval",
            "frontend.log_stats_interval_s",
            "Seconds between log lines with statistics",
            number(0.5),
            metavar="SECONDS",
        ),
        Flag(
            "--dump-dir",
            "frontend.dump_dir",
            "Directory for scheduler event dumps; also enables POST /debug/dump",
            metavar="DIR",
            default_text="a private temporary directory",
        ),
        Flag(
            "--metrics-compat",
            "frontend.metrics_compat",
            "Also publish metrics under another server's names",
            choices=("vllm",),
            many=True,
        ),
    ),
}
