"""The flags of other servers that would change answers and have no direct counterpart, with what to use instead."""

from __future__ import annotations

from typing import Final

_ONE_PER_REPLICA: Final = (
    "start engine serve once per replica, without --data-parallel-size, behind the load balancer"
)
_SEVERAL_MACHINES: Final = (
    "use --nnodes N, --node-rank R and --master-addr HOST; --data-parallel-size counts all replicas"
)
_GPUS: Final = "set CUDA_VISIBLE_DEVICES"
_CONFIG_FIELDS: Final = "use --hf-overrides with the fields of config.json, such as rope_parameters"
_KV_SIZE: Final = (
    "use --num-gpu-blocks-override N (blocks of --block-size tokens) or --kv-cache-memory-bytes"
)
_PARSERS: Final = "use a name of {}, or have clients parse the text (--{} none)"
_ROLES: Final = "use --replica-roles in one server, or --kv-transfer-config between servers"
_HOST_CACHE: Final = "use --kv-host-gib GIB per worker, or --kv-offloading-size GIB per replica"
_TOOLS: Final = "use --mcp-servers LABEL=URL,…; see docs/how-to/responses.md"
_PER_REQUEST: Final = "set it in requests"
_DRY: Final = "set dry_multiplier and the other fields of DRY in requests"
_ONE_MODEL: Final = "use engine router FILE; see docs/how-to/several-models.md"
_DISK: Final = "use --kv-disk DIRECTORY"
_SMALLER: Final = (
    "use -q int8 or -q int4 (CPU), a quantized checkpoint, or more GPUs with --tensor-parallel-size"
)
_REPLICAS_MULTIPLY: Final = (
    "with experts use --data-parallel-size N --tensor-parallel-size 1 --enable-expert-parallel, "
    "because Engine's replicas are in addition to the workers of one"
)
_STORE: Final = "use --store DIRECTORY"

_REASONS: Final[dict[str, str]] = {
    # Several machines and replicas
    "--data-parallel-address --data-parallel-rpc-port --data-parallel-size-local --data-parallel-start-rank "
    "-dpa -dpp -dpl -dpr": _SEVERAL_MACHINES,
    "--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb "
    "--data-parallel-rank --data-parallel-supervisor-port -dpe -dph -dpm -dpn": _ONE_PER_REPLICA,
    "--attention-data-parallel-size --attn-dp-size --enable-dp-attention": _REPLICAS_MULTIPLY,
    "--attention-context-parallel-size --attn-cp-size --dcp-size --enable-prefill-context-parallel "
    "--enable-prefill-cp --enable-nsa-prefill-context-parallel": "use --tensor-parallel-size or --pipeline-parallel-size",
    "--disaggregation-bootstrap-port --disaggregation-transfer-backend --disaggregation-ib-device": _ROLES,
    "--rpc": "use --nnodes N, --node-rank R and --master-addr HOST",
    # Devices and memory
    "--device-ids --list-devices -dev --spec-draft-device --device-draft -devd": _GPUS,
    "--enable-elastic-ep --elastic-ep-max-dp-size": "use engine upgrade to change the number of replicas",
    "--max-total-tokens": _KV_SIZE,
    "--kv-cache-dtype-skip-layers": "use --kv-cache-dtype auto",
    "--hicache-ratio --hicache-size --hicache-host-memory-fraction": _HOST_CACHE,
    "--hicache-storage-backend --hicache-storage-backend-extra-config": _DISK,
    "--offload-backend --offload-params --cpu-offload-params --offload-mode --offload-num-in-group "
    "--offload-prefetch-step --cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --kt-method --kt-weight-path "
    "--kt-cpuinfer --kt-num-gpu-experts --kt-threadpool-count": _SMALLER,
    "--no-kv-offload": "use --device cpu, or leave the flag out",
    # The model
    "--disable-sliding-window": "use --max-model-len with the length of the window",
    "--hf-config-path": "use --hf-overrides, or a directory with this config.json and links to the weights",
    "--quantization-config --quantization-param-path --quantize-and-serve --modelopt-quant": "use -q int8 or -q int4 "
    "(CPU), or a checkpoint that is quantized already",
    "--rope-scaling --rope-theta --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
    "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv": _CONFIG_FIELDS,
    "--hf-file -hff": "it needs --hf-repo ORG/NAME",
    "--model-url -mu --docker-repo -dr --mmproj-url -mmu": "download the file and pass its path",
    "--max-seq-len-to-capture": "use --max-cudagraph-capture-size, in tokens of a step",
    "--models-dir --models-preset --models-max": _ONE_MODEL,
    "--image-min-tokens --image-max-tokens --mm-process-config": "use --mm-processor-kwargs, such as "
    '\'{"size": {"shortest_edge": 3136, "longest_edge": 1003520}}\'',
    "--video-fps": 'use --media-io-kwargs \'{"video": {"fps": 2}}\'',
    # Scheduling
    "--enable-priority-scheduling --default-priority-value --abort-on-priority-when-disabled": "use --scheduling-policy "
    "priority, where a lower number goes first, as in vLLM",
    "--disable-priority-preemption": "use --no-priority-preemption",
    "--max-num-scheduled-tokens": "use --max-num-batched-tokens",
    "--max-num-active-seqs": "use --max-num-seqs",
    "--long-prefill-token-threshold-adaptive": "use --prefill-step-ms, which adapts to measured times",
    # Requests and answers
    "--allow-auto-truncate": "set truncate_prompt_tokens to -1 in requests",
    "--hf-chat-template-name --completion-template": "use --chat-template FILE",
    "--stream-response-default-include-usage": "use --enable-force-include-usage",
    "--tool-parser-plugin": _PARSERS.format("--tool-call-parser", "tool-call-parser"),
    "--reasoning-parser-plugin": _PARSERS.format("--reasoning-parser", "reasoning-parser"),
    "--tool-server --tools --mcp-servers-config --mcp-servers-json --agent -ag --ui-mcp-proxy --webui-mcp-proxy": _TOOLS,
    "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker": _DRY,
    "--samplers --sampler-seq --sampling-seq --logit-bias -l --grammar --grammar-file --json-schema -j "
    "--json-schema-file -jf --ignore-eos --reverse-prompt --special -sp": _PER_REQUEST,
    "--mirostat-lr --mirostat-ent --adaptive-target --adaptive-decay": "use --temp, --top-p or --min-p",
    "--repeat-last-n": "use --repeat-penalty, which applies to the whole prompt and output",
    "--context-shift": "set max_tokens and truncate_prompt_tokens in requests",
    "--reasoning-budget-message": "set thinking_token_budget in requests",
    "--logits-processors --enable-custom-logit-processor": "use logit_bias, allowed_token_ids or structured outputs in requests",
    "--file-storage-path --enable-response-store": _STORE,
    "--trust-request-mm-kwargs": "use --mm-processor-kwargs",
    "--constrained-json-disable-any-whitespace": "requests get JSON without spaces from a regex or a grammar",
    "--reasoning-config --enable-strict-thinking": "set thinking_token_budget in requests",
    "--incremental-streaming-output": "read the new part of each text of /generate, or use /v1/completions",
    "--reasoning-effort-map --interleave-mm-strings --reasoning-preserve --no-reasoning-preserve": "use --chat-template",
    "--enable-return-aux-hidden-states --return-aux-hidden-state-layer-ids": "use --hidden-states with layers; "
    "layer N+1 is what SGLang's layer N returns",
    "--multi-item-scoring-delimiter --enable-mis": "use /v1/score with several texts, which share their prefix",
    "--no-prefill-assistant": "end conversations with a user's message",
    "--encoder-only --language-only --mm-encoder-only --encoder-urls": "serve the whole model with one engine serve",
    "--media-url-max-file-size-mb": "use --max-request-memory",
    "--code-revision": "use --revision, because code and weights come from the same commit",
    "--ignore-patterns": "use ORG/NAME:FILE.gguf for one file; other files than the checkpoint's are never downloaded",
    "--file -f --prompt -p --binary-file -bf": "use engine complete or engine chat",
    "--path --log-prompts-dir": "use a web server in front",
    "--video-timestamp-interval": "use --mm-processor-kwargs",
    "--spm-infill": "use --chat-template; the model's own order of infill tokens is read from its files",
    "--cache-list -cl": "use engine doctor, which lists caches",
    "--completion-bash": "use engine completion bash",
    "--version": "use engine --version",
    "--fingerprint-value": "clients see a fingerprint of the weights, the options and the version",
    "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default "
    "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
    "--fim-qwen-30b-default --embd-gemma-default": "use -hf ORG/NAME with the model's name",
    # Files and logs
    "--crash-dump-folder": "use --dump-dir DIRECTORY",
    "--log-file": "redirect the output, as with 2> FILE",
    "--offline": "set HF_HUB_OFFLINE=1",
    "--grpc --grpc-mode --grpc-port --smg-grpc-mode": "use the HTTP API",
}
"""Flags, separated by spaces -> what to use instead of them."""

_UNKNOWN_HERE: Final = """
--aux-output-config --cohere-is-reasoning-model --control-vector --control-vector-layer-range --control-vector-scaled
--custom-sigquit-handler --custom-weight-loader --debug-tensor-dump-inject --debug-tensor-dump-input-file
--debug-tensor-dump-layers --debug-tensor-dump-output-folder --decoupled-spec-bind-endpoint
--decoupled-spec-connect-endpoints --decoupled-spec-rank --decoupled-spec-role --decrypted-config-file
--decrypted-draft-config-file --delete-ckpt-after-loading --diffusion-config --disaggregation-decode-enable-radix-cache
--disaggregation-enable-kv-checksum --ds-channel-config-path
--ds-heavy-channel-num --ds-heavy-channel-type --ds-heavy-token-num --ds-sparse-decode-threshold --dwdp-size
--ec-manager-config --elastic-ep-initial-size --elastic-ep-join-mode --elastic-ep-join-rank-offset
--ep-join-mode --ep-join-rank-offset
--enable-double-sparsity --enable-flexkv --enable-hisparse --enable-pd-role-switch --enable-return-indexer-topk
--enable-return-routed-experts --enable-streaming-session --enable-unified-cache-external-linker --enable-watermark
--encoder-bootstrap-port --encoder-register-urls --engram-config --experts-shared-outer-loras --flexkv-config-file
--forward-hooks --hierarchical-sparse-attention-extra-config --hisparse-config --io-processor-plugin
--kt-max-deferred-experts-per-token --max-ep-size --max-lora-cls-labels --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --model-checksum --model-class-overrides
--model-config-parser --modelexpress-config --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path
--modelopt-export-path --msprobe-dump-config --optimistic-prefill-attempts --otlp-service-name
--remote-instance-weight-loader-backend --remote-instance-weight-loader-seed-instance-ip
--remote-instance-weight-loader-seed-instance-service-port
--remote-instance-weight-loader-send-weights-group-ports
--remote-instance-weight-loader-start-seed-via-transfer-engine --return-input-ids --return-output-ids
--return-sampling-mask --rl-quant-profile --sampling-mask-max-tokens --sidecar --sidecar-args --spec-synth-len
--spec-synth-rates --spec-trace-dir --speculative-draft-model-revision
--speculative-ngram-external-corpus-max-tokens --speculative-ngram-external-corpus-path
--speculative-ngram-external-sam-budget --strip-thinking-cache --tokenizer-metrics-custom-labels-header
--tool-strict-level --tools-runtime --stat-loggers --unified-cache-external-linker-backend
--unified-cache-external-linker-config
--uno-lora-path --watermark-config --worker-extension-cls -dc
"""

INSTEAD: Final[dict[str, str]] = {
    **dict.fromkeys(_UNKNOWN_HERE.split(), "nothing in Engine does the like, so remove it"),
    **{flag: reason for flags, reason in _REASONS.items() for flag in flags.split()},
}
"""Flag of another server -> what to use instead."""
