"""Every flag of `engine serve`, as data.

A flag fills one field of `ModelOptions` or of a section of `EngineConfig`; its default is that field's.
Names are vLLM's, or our own where vLLM has none; aliases are what SGLang, TensorRT-LLM and llama.cpp call
the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..protocol.config import ExecutorBackend
from .flag_values import (
    api_keys_in_file,
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
from .model_options import CHECKPOINT_QUANTIZATIONS

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Flag:
    """`names` are separated by spaces, the shown one first. `type` bool makes a pair with `--no-…`.

    `const` is stored by a flag without a value, for which no default is shown; `many` takes several values at once;
    `default_text` is shown where the field's default would mislead.
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
        Flag("--model --model-path -m", "model.model", "the same as MODEL", metavar="MODEL"),
        Flag(
            "--served-model-name --alias",
            "model.served_model_name",
            "names that clients may use for it; the first is the one in answers",
            metavar="NAME",
            many=True,
        ),
        Flag(
            "--tokenizer",
            "model.tokenizer",
            "directory or hub name, if not the model's",
            metavar="PATH",
        ),
        Flag("--revision", "model.revision", "branch, tag or commit on the hub"),
        Flag(
            "--download-dir",
            "model.download_dir",
            "where hub models are kept instead of its own cache",
            metavar="DIR",
        ),
        Flag(
            "--dtype",
            "model.dtype",
            "of weights that are not quantised: auto (bfloat16; on a CPU without AMX what is stored in float16 stays so, exact but slower), float32, float16 (half) or bfloat16",
            dtype,
            metavar="DTYPE",
        ),
        Flag(
            "--load-format",
            "model.load_format",
            "auto reads the checkpoint; dummy its config alone, and makes up the weights",
            choices=("auto", "dummy"),
        ),
        Flag(
            "--quantization -q",
            "model.quantization",
            "int8 and int4 quantise at load what is not quantised yet (CPU); the others say what the checkpoint must be quantised with",
            choices=("int8", "int4", *CHECKPOINT_QUANTIZATIONS),
        ),
        Flag(
            "--seed",
            "model.seed",
            "makes outputs of requests without a seed repeatable; 0 does not",
            integer(0, MAX_SEED),
        ),
        Flag(
            "--max-model-len --context-length --ctx-size --max-seq-len -c",
            "model.max_model_len",
            "most tokens of a prompt and its output together; 32k is 32000, 32K 32768; auto is the model's own limit",
            model_length,
            metavar="N",
            default_text="auto",
        ),
        Flag(
            "--hf-overrides",
            "model.hf_overrides",
            "fields to replace in the model's config.json",
            json_object,
            metavar="JSON",
        ),
        Flag(
            "--generation-config",
            "model.generation_config",
            "sampling defaults: auto (the model's own), vllm (none) or a path",
            metavar="SOURCE",
        ),
        Flag(
            "--override-generation-config",
            "model.override_generation_config",
            "sampling defaults that win over the former; max_new_tokens limits every request",
            json_object,
            metavar="JSON",
        ),
    ),
    "server": (
        Flag("--host", "frontend.host", "address to listen on; 0.0.0.0 is every interface"),
        Flag("--port", "frontend.port", "0 takes any free one", integer(0, 65535)),
        Flag("--uds", "frontend.uds", "listen on this unix socket instead", metavar="PATH"),
        Flag(
            "--api-key",
            "frontend.api_keys",
            "keys that clients must present; else $ENGINE_API_KEY",
            metavar="KEY",
            many=True,
        ),
        Flag(
            "--api-key-file",
            "frontend.api_keys",
            "file with one key a line",
            api_keys_in_file,
            metavar="FILE",
        ),
        Flag("--root-path", "frontend.root_path", "prefix that a proxy in front strips"),
        Flag(
            "--ssl-keyfile",
            "frontend.ssl_keyfile",
            "serve HTTPS: the private key",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--ssl-certfile",
            "frontend.ssl_certfile",
            "and the certificate chain",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--allowed-origins",
            "frontend.allowed_origins",
            "origins of browsers that may call",
            text_or_json_list,
            metavar="ORIGIN",
        ),
        Flag(
            "--api-server-count",
            "parallel.api_server_count",
            "frontend processes, which share the port",
            integer(1, 256),
        ),
        Flag(
            "--max-body-bytes",
            "frontend.max_body_bytes",
            "largest request body, as 32MiB",
            size(1024),
        ),
        Flag(
            "--max-logprobs",
            "frontend.max_logprobs",
            "most logprobs a request may ask for; -1 is no limit",
            integer(-1),
        ),
        Flag("--strict", "frontend.strict", "refuse requests with unknown fields", bool),
        Flag(
            "--timeout-keep-alive",
            "frontend.keep_alive_s",
            "seconds an idle connection is kept",
            number(0),
        ),
        Flag(
            "--timeout-slow-client",
            "frontend.slow_client_s",
            "seconds a client may take to send a request (more while 1000 bytes come a second), or to read on",
            number(1, 86400),
        ),
        Flag(
            "--default-deadline",
            "frontend.default_deadline_s",
            "seconds after which a request without X-Request-Timeout is given up; 0 is never",
            number(0),
        ),
        Flag(
            "--shutdown-timeout",
            "frontend.shutdown_timeout_s",
            "seconds that running requests get to finish when the server stops",
            number(0),
        ),
        Flag(
            "--stream-interval",
            "frontend.stream_interval",
            "tokens between two events of a stream",
            integer(1),
        ),
        Flag(
            "--enable-prompt-tokens-details",
            "frontend.enable_prompt_tokens_details",
            "report cached prompt tokens in usage",
            bool,
        ),
    ),
    "chat": (
        Flag(
            "--chat-template",
            "frontend.chat_template",
            "file, or the template itself, if not the model's",
            metavar="TEMPLATE",
        ),
        Flag(
            "--chat-template-content-format",
            "frontend.chat_template_content_format",
            "how message content is given to the template",
            choices=("auto", "string", "openai"),
        ),
        Flag(
            "--tool-call-parser",
            "frontend.tool_call_parser",
            "how the model writes tool calls: hermes, qwen3, llama3_json, llama4_json, mistral, granite, pythonic, "
            "llama4_pythonic",
            metavar="NAME",
        ),
        Flag(
            "--reasoning-parser",
            "frontend.reasoning_parser",
            "how the model marks its reasoning (a JSON schema or forced call holds for the answer after it): deepseek_r1, qwen3, granite",
            metavar="NAME",
        ),
        Flag("--response-role", "frontend.response_role", "role of the answer"),
    ),
    "scheduler": (
        Flag(
            "--max-num-seqs --max-running-requests --max-batch-size --parallel -np",
            "scheduler.max_num_seqs",
            "requests that run at once",
            integer(1, 65536),
            default_text="256, on a CPU 64",
        ),
        Flag(
            "--max-num-batched-tokens --chunked-prefill-size --max-num-tokens",
            "scheduler.max_num_batched_tokens",
            "tokens in one step",
            size(1),
            default_text="2048, on a CPU 512",
        ),
        Flag(
            "--max-num-queued-reqs --max-queued-requests",
            "scheduler.max_num_queued_reqs",
            "requests that may wait in each replica; 0 is no limit",
            integer(0),
        ),
        Flag(
            "--max-num-queued-tokens",
            "scheduler.max_num_queued_tokens",
            "prompt tokens that may wait in each replica; 0 is no limit",
            size(0),
        ),
        Flag(
            "--max-num-seqs-per-tenant",
            "scheduler.max_num_seqs_per_tenant",
            "requests of one tenant that run at once in each replica; 0 is no limit",
            integer(0),
        ),
        Flag(
            "--max-num-queued-reqs-per-tenant",
            "scheduler.max_num_queued_reqs_per_tenant",
            "requests of one tenant that may wait in each replica; 0 is no limit",
            integer(0),
        ),
        Flag(
            "--scheduling-policy --schedule-policy",
            "scheduler.policy",
            "which waiting request comes next",
            choices=("fcfs", "priority", "fair", "deadline"),
        ),
        Flag(
            "--priority-preemption",
            "scheduler.priority_preemption",
            "under priority, displace running requests of lower priority",
            bool,
        ),
        Flag(
            "--tenant-weights",
            "scheduler.tenant_weights",
            'shares under fair by tenant, 1 for others: with several API keys, {"key 1": 2, "key 2": 1} in their order, '
            "else by the user that requests name",
            json_object,
            metavar="JSON",
        ),
        Flag(
            "--max-num-partial-prefills",
            "scheduler.max_num_partial_prefills",
            "prompts that are computed in parts at a time; 0 is no limit",
            integer(0),
        ),
        Flag(
            "--max-long-partial-prefills",
            "scheduler.max_long_partial_prefills",
            "those of them over the threshold; 0 is no limit",
            integer(0),
        ),
        Flag(
            "--scheduler-delay-factor",
            "scheduler.scheduler_delay_factor",
            "wait this many prefill times before the next admission",
            number(0, 1000),
            metavar="FACTOR",
        ),
        Flag(
            "--long-prefill-token-threshold",
            "scheduler.long_prefill_token_threshold",
            "most tokens of one prompt in a step; 0 is no limit",
            size(0),
        ),
        Flag(
            "--enable-chunked-prefill",
            "scheduler.enable_chunked_prefill",
            "compute a long prompt in several steps, beside the tokens of others",
            bool,
        ),
        Flag(
            "--async-scheduling",
            "scheduler.async_scheduling",
            "schedule a step before the one before it has ended",
            bool,
        ),
        Flag(
            "--preemption-mode",
            "scheduler.preemption_mode",
            "with --kv-host-gib, what becomes of a preempted request's blocks: recompute drops them, swap copies "
            "them at once, auto as their memory is taken",
            choices=("recompute", "swap", "auto"),
        ),
        Flag(
            "--speculative-config",
            "scheduler.speculative",
            "most tokens that are tried at once where a request repeats its prompt or itself, 0 for none, and after how "
            "many repeated ones; what is generated stays the same",
            speculative,
            metavar="JSON",
            default_text='{"num_speculative_tokens": 8, "prompt_lookup_min": 2}, none on a GPU or with -pp',
        ),
        Flag(
            "--inject-preemption",
            "scheduler.inject_preemption",
            "preempt at random with this probability (for tests)",
            number(0, 1),
            metavar="P",
        ),
    ),
    "KV cache": (
        Flag("--block-size --page-size", "cache.block_size", "tokens in a block", integer(1, 1024)),
        Flag(
            "--gpu-memory-utilization --mem-fraction-static",
            "cache.gpu_memory_utilization",
            "share of the device's memory to use",
            number(0.01, 1),
            metavar="SHARE",
        ),
        Flag(
            "--kv-cache-memory-bytes",
            "cache.kv_cache_memory_bytes",
            "size of the cache instead, as 4GiB",
            size(1),
        ),
        Flag(
            "--kv-cache-dtype",
            "cache.kv_cache_dtype",
            "element type of the cache; auto is that of --dtype, with whose auto it is bfloat16",
            choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3"),
        ),
        Flag(
            "--num-gpu-blocks-override",
            "cache.num_blocks_override",
            "number of blocks, whatever fits",
            integer(2),
        ),
        Flag(
            "--enable-prefix-caching", "cache.enable_prefix_caching", "reuse shared prefixes", bool
        ),
        Flag(
            "--prefix-hash --prefix-caching-hash-algo",
            "cache.prefix_hash",
            "what shared prefixes are found by: sha256, or xxh3 (xxhash) where every user is trusted",
            prefix_hash,
            metavar="HASH",
        ),
        Flag(
            "--kv-host-gib --swap-space",
            "cache.host_gib",
            "host memory of each worker for blocks that were evicted or preempted, in GiB",
            number(0),
            metavar="GIB",
        ),
        Flag(
            "--kv-offloading-size",
            "cache.host_gib",
            "the same, of all workers of a replica together",
            per_replica,
            metavar="GIB",
        ),
        Flag(
            "--disable-radix-cache",
            "cache.enable_prefix_caching",
            "--no-enable-prefix-caching, as SGLang calls it",
            const=False,
        ),
        Flag(
            "--kv-events-config",
            "cache.kv_events",
            "publish which blocks are cached: {endpoint, replay_endpoint, buffer_steps, hwm, topic}",
            kv_events,
            metavar="JSON",
        ),
    ),
    "recovery": (
        Flag(
            "--heartbeat-timeout",
            "recovery.heartbeat_timeout_s",
            "a process that gives no sign of life for so many seconds is killed and started again",
            number(1),
            metavar="S",
        ),
        Flag(
            "--step-timeout",
            "recovery.step_timeout_s",
            "so is a worker whose step takes longer than this",
            number(1),
            metavar="S",
        ),
        Flag(
            "--max-restarts",
            "recovery.max_restarts",
            "give up after more deaths than this with no token and no cause found in between, unless another replica, or frontend, serves",
            integer(0),
            metavar="N",
        ),
        Flag(
            "--inject-crash",
            "recovery.inject_crash",
            "a worker kills itself when a prompt has this token (for tests)",
            integer(0),
            metavar="TOKEN",
        ),
    ),
    "device": (
        Flag(
            "--device",
            "device.device",
            "where the model runs; auto is the GPU if there is one, null makes tokens up without a model",
            choices=("auto", "cpu", "cuda", "null"),
        ),
        Flag(
            "--threads -t",
            "device.threads",
            "CPU threads of a worker; 0 is every core it may use (one less on plain torch)",
            integer(0, 4096),
        ),
        Flag(
            "--cpu-backend",
            "device.cpu_backend",
            "auto is native where it can run the model, else plain torch",
            choices=("auto", "native", "torch"),
        ),
        Flag(
            "--enforce-eager",
            "device.enforce_eager",
            "capture no CUDA graphs: a quicker start, slower steps",
            bool,
        ),
        Flag(
            "--max-cudagraph-capture-size --cuda-graph-max-bs",
            "device.max_cudagraph_capture_size",
            "tokens of the largest step that is captured as a CUDA graph; 0 captures none",
            integer(0, 65536),
        ),
        Flag(
            "--batch-invariant --enable-deterministic-inference",
            "device.batch_invariant",
            "on a GPU, too, a token's numbers do not depend on what shares its step; slower",
            bool,
        ),
        Flag(
            "--null-step-ms",
            "device.null_step_ms",
            "what a step takes on the null device, in milliseconds",
            number(0, 3_600_000),
            metavar="MS",
        ),
    ),
    "parallelism": (
        Flag(
            "--tensor-parallel-size --tp --tp-size -tp",
            "parallel.tensor_parallel_size",
            "workers that share each layer",
            integer(1, 1024),
        ),
        Flag(
            "--pipeline-parallel-size --pp --pp-size -pp",
            "parallel.pipeline_parallel_size",
            "stages of layers, one after the other, each with its workers",
            integer(1, 1024),
        ),
        Flag(
            "--data-parallel-size --dp --dp-size -dp",
            "parallel.data_parallel_size",
            "replicas of the model, each with its own KV cache",
            integer(1, 256),
        ),
    ),
    "several machines": (
        Flag(
            "--nnodes -n",
            "parallel.nnodes",
            "machines that share the workers equally; each runs engine serve",
            integer(1, 1024),
        ),
        Flag(
            "--node-rank -r",
            "node.node_rank",
            "which of them this is; 0 has the API, the others are --headless",
            integer(0, 1023),
        ),
        Flag("--headless", "node.headless", "only run workers, as the nodes but 0 do", const=True),
        Flag(
            "--master-addr",
            "parallel.master_addr",
            "where the other machines reach node 0",
            metavar="HOST",
        ),
        Flag(
            "--master-port",
            "parallel.master_port",
            "the first of the ports there that must be free: 1 + 2 for each replica",
            integer(1, 65535),
        ),
        Flag(
            "--cluster-key --key",
            "parallel.cluster_key",
            "file of engine keygen, the same on every machine",
            existing_file,
            metavar="FILE",
        ),
        Flag(
            "--distributed-executor-backend",
            "parallel.distributed_executor_backend",
            "who starts the workers: engine serve itself, or torchrun with engine worker",
            choices=tuple(ExecutorBackend),
        ),
    ),
    "logging": (
        Flag(
            "--log-level --uvicorn-log-level",
            "frontend.log_level",
            "least severe messages to log",
            choices=("debug", "info", "warning", "error", "critical"),
        ),
        Flag("--enable-log-requests", "frontend.log_requests", "log each request", bool),
        Flag(
            "--disable-log-requests",
            "frontend.log_requests",
            "--no-enable-log-requests, as vLLM calls it",
            const=False,
        ),
        Flag(
            "--dump-dir",
            "frontend.dump_dir",
            "where the last events of the scheduler are written after a crash, on SIGUSR1 to a core, and by "
            "POST /debug/dump, which only this flag allows",
            metavar="DIR",
            default_text="a private temporary directory",
        ),
        Flag(
            "--metrics-compat",
            "frontend.metrics_compat",
            "also publish the metrics under the names of another server",
            choices=("vllm",),
            many=True,
        ),
    ),
}
