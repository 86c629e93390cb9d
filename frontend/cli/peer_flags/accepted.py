"""The flags of other servers that Engine accepts and that change nothing.

Flags with one of the values in `PEER_FLAGS` describe what Engine does anyway. The other flags choose kernels, buffers,
threads, graphs or logs of another server, which have no counterpart in Engine and change no answer.
"""

from __future__ import annotations

from typing import Final

PEER_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "--base-gpu-id": ("0",),
    "--cohere-format": ("auto",),
    "--config-format": ("auto", "hf", "mistral"),
    "--cont-batching": (),
    "--convert": ("auto", "none", "embed"),
    "--cpu-offload-gb": ("0", "0.0"),
    "--data-parallel-backend": ("mp",),
    "--decode-context-parallel-size": ("1",),
    "--disable-uvicorn-access-log": (),
    "--disaggregation-mode": ("null",),
    "--embd-normalize": ("2",),
    "--embedding": (),
    "--embeddings": (),
    "--enable-cache-report": (),
    "--enable-metrics": (),
    "--enable-request-id-headers": (),
    "--enable-server-load-tracking": (),
    "--enable-sleep-mode": (),
    "--exclude-tools-when-tool-choice-none": (),
    "--gpu-id-step": ("1",),
    "--gpu-layers": ("99", "999", "-1", "all", "auto"),
    "--guided-decoding-backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "--is-embedding": (),
    "--jinja": (),
    "--kv-offloading-backend": ("native",),
    "--kv-unified": (),
    "--logprobs-mode": ("raw_logprobs",),
    "--lora-dtype": ("auto",),
    "--mamba-cache-dtype": ("auto", "float32"),
    "--mamba-ssm-cache-dtype": ("auto", "float32"),
    "--mamba-ssm-dtype": ("float32",),
    "--metrics": (),
    "--mirostat": ("0",),
    "--moe-data-parallel-size": ("1",),
    "--moe-dp-size": ("1",),
    "--n-gpu-layers": ("99", "999", "-1", "all", "auto"),
    "--no-context-shift": (),
    "--offload-group-size": ("0", "-1"),
    "--prefill-context-parallel-size": ("1",),
    "--reasoning-budget": ("-1",),
    "--rerank": (),
    "--reranking": (),
    "--rl-on-policy-target": ("none",),
    "--runner": ("generate", "pooling", "auto"),
    "--slots": (),
    "--speculative-accept-threshold-acc": ("1", "1.0"),
    "--speculative-accept-threshold-single": ("1", "1.0"),
    "--task": (
        "generate",
        "embed",
        "embedding",
        "classify",
        "score",
        "reward",
        "transcription",
        "auto",
    ),
    "--tokenizer-mode": ("auto", "hf", "mistral"),
    "--torchao-config": ("",),
    "--video-pruning-rate": ("0", "0.0"),
    "--worker-cls": ("auto",),
    "--anthropic-disabled-thinking-effort": ("omit",),
    "--fingerprint-mode": ("full",),
    "--lora-target-modules": ("all",),
    "--moe-dense-tp-size": ("1",),
    "--video-pruning-method": ("evs",),
    "-cb": (),
    "-dcp": ("1",),
    "-dpb": ("mp",),
    "-ngl": ("99", "999", "-1", "all", "auto"),
    "-pcp": ("1",),
}
"""Flags of other servers that already describe Engine's behavior -> the values that do.

A flag without values takes none.

They are accepted and ignored. For example, there is no access log, a GPU computes all layers, and a model's files say
which format they have.
"""

_SWITCHES: Final = """
--aggregate-engine-logging --allow-deprecated-quantization --cache-idle-slots --cache-prompt --check-tensors
--checkpoint-engine-wait-weights-before-ready --cudagraph-metrics --dcp-q-replicate --dcp-replicate-q-proj
--debug-cuda-graph --disable-aiter-allreduce-fusion-in-decode --disable-aiter-allreduce-fusion-in-prefill
--disable-attn-tp-gather --disable-cascade-attn --disable-chunked-prefix-cache --disable-cuda-graph-padding
--disable-custom-all-reduce --disable-fast-image-processor --disable-flashinfer-autotune
--disable-flashinfer-cutlass-moe-fp4-allgather --disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager
--disable-hybrid-swa-memory --disable-mm-preprocessor-cache --disable-nccl-for-dp-synchronization
--disable-outlines-disk-cache --disable-piecewise-cuda-graph --disable-prefill-cuda-graph
--disable-shared-experts-fusion --disable-tokenizer-batch-decode --enable-adaptive-dispatch-to-encoder
--enable-aiter-allreduce-fusion --enable-amd-monokernel --enable-attn-tp-input-scattered
--enable-batch-sharded-sampling --enable-broadcast-mm-inputs-process --enable-cp-decode-attn-tp
--enable-cudagraph-gc --enable-cumem-allocator --enable-dbo --enable-deepseek-v4-fp4-indexer
--enable-dense-mlp-attn-tp --enable-dp-attention-local-control-broadcast --enable-dp-lm-head
--enable-draft-weights-cpu-backup --enable-dsa-cache-layer-split --enable-dsa-fused-indexer
--enable-dynamic-batch-tokenizer --enable-dynamic-chunking --enable-elastic-expert-backup --enable-ep-weight-filter
--enable-eplb --enable-expert-distribution-metrics --enable-fault-tolerance --enable-flash-late-interaction
--enable-flashinfer-allreduce-fusion --enable-flashinfer-autotune --enable-forward-pass-metrics
--enable-fp32-lm-head --enable-fused-moe-sum-all-reduce --enable-fused-qk-norm-rope --enable-hc-sp
--enable-hicache --enable-hierarchical-cache --enable-http-worker-reuseport --enable-http2
--enable-kv-cache-sharding --enable-layernorm-sp --enable-layerwise-nvtx-marker --enable-layerwise-nvtx-tracing
--enable-lean-attention --enable-linear-replayssm --enable-linear-replayssm-spec --enable-linker-mla-dedup
--enable-log-deltas --enable-log-outputs --enable-logging-iteration-details --enable-lora-overlap-loading
--enable-mamba-shared-prefix-checkpoint --enable-memory-saver --enable-metrics-for-all-schedulers
--enable-mfu-metrics --enable-mixed-chunk --enable-mixed-moe-lora-format --enable-mm-global-cache --enable-moe-shared-loras
--enable-mscclpp --enable-multi-layer-eagle --enable-multimodal --enable-multimodal-encoder-data-parallel
--enable-nan-detection --enable-nccl-comm-suspend --enable-nccl-nvls --enable-nvidia-megakernel
--enable-offline-docs --enable-p2p-check --enable-page-major-kv-layout --enable-paged-experts --enable-pdmux
--enable-piecewise-cuda-graph --enable-precise-embedding-interpolation --enable-prefill-delayer
--enable-prefix-mm-cache --enable-profile-cuda-graph --enable-request-time-stats-logging --enable-scale-out
--enable-scattered-sconv --enable-session-radix-cache --enable-shared-experts-attn-tp --enable-shm-tensor-arena
--enable-single-batch-overlap --enable-symm-mem --enable-tokenizer-batch-encode
--enable-torch-compile --enable-torch-compile-debug-mode --enable-torch-symm-mem --enable-tower-connector-lora
--enable-tp-lm-head-all-to-all --enable-trace --enable-trace-replay --enable-two-batch-overlap
--enable-unified-memory --enable-waterfill --enable-weights-cpu-backup --enforce-disable-flashinfer-allreduce-fusion
--enforce-piecewise-cuda-graph --enforce-shared-experts-fusion --escape --export-metrics-to-file
--fail-on-environ-validation --flashinfer-mla-disable-ragged --fully-sharded-loras --keep-mm-feature-on-device
--kv-cache-metrics --kv-offload --kv-sharing-fast-prefill --kv-unified-per-slot --load-publish-endpoint
--log-error-stack --log-prefix --log-timestamps --lora-use-virtual-experts --mm-device-do-normalize
--mm-enable-dp-encoder --mmproj-auto --mmproj-offload --models-autoload --numa-bind --op-offload
--per-request-spec-decode-metrics --perf --ple-offload-embedding --pre-warm-nccl --prefill-assistant
--prefill-only-disable-kv-cache --prefill-round-robin-balance --props --ray-workers-use-nsight --repack
--reuse-port --scheduler-reserve-full-isl --schedule-low-priority-values-first --show-time-cost
--skip-mm-profiling --skip-server-warmup --sleep-mode-offload-cudagraph --sleep-on-idle
--sleep-preserve-parameter-names --spec-default --spec-draft-backend-sampling --specialize-active-lora
--speculative-adaptive --speculative-use-block-verification --speculative-use-rejection-sampling --stream-output
--swa-full --triton-attention-reduce-in-fp32 --trust-mm-content-hashes --ui --use-ray --use-replayssm
--use-tqdm-on-load --warmup --weight-loader-disable-mmap --weight-loader-drop-cache-after-load
--weight-loader-prefetch-checkpoints --webui --collect-tokens-histogram
--disaggregation-decode-enable-offload-kvcache --dllm-fdfo --dsa-triton-union --enable-decoder-swa-bounded-replay
--enable-encoder-swa-bounded-replay --enable-int8-mamba-checkpoint --enable-mamba-cache-stochastic-rounding
--enable-megamoe-for-layernorm-sp --enable-quant-communications --enable-tf32-matmul --enable-w4a4-mxfp4-megamoe
--jit-monitor-verbose --kv-canary --kv-canary-real-data --lora-strict-loading --mlx-enable-sampling --no-host
--backend-sampling --monokernel --speculative-dspark-align-verify-tokens-to-graph-tier
--speculative-enable-w4a4-mxfp4-megamoe --spec-draft-cpu-moe --cpu-moe-draft --swa-bounded-replay --use-fp64-gumbel
--no-agent --no-cont-batching --no-jinja --no-kv-unified --no-log-jsonl --no-skip-chat-parsing --no-slots --no-ui-mcp-proxy
--no-webui-mcp-proxy -bs -cmoed -e -no-ag -nocb -kvo -nkvo -nr -kvu -no-kvu -O0 -O1 -O2 -O3
"""

_WITH_VALUE: Final = """
--additional-config --all2all-backend --asr-max-buffer-seconds --asr-max-concurrent-sessions --attention-backend
--attention-config --batch-notify-size --bf16-gemm-backend --boundary-reduction --bucket-e2e-request-latency
--bucket-inter-token-latency --bucket-time-to-first-token --c128-page-size --cache-ram --cache-reuse
--checkpoint-min-step --collect-detailed-traces --compilation-config --constrained-json-max-whitespace-cnt
--constrained-json-whitespace-pattern --cp-kv-cache-interleave-size --cp-strategy --cpu-distributed-timeout-seconds
--cpu-mask --cpu-mask-batch --cpu-range --cpu-range-batch --cpu-strict --cpu-strict-batch --ctx-checkpoints
--cuda-graph-backend-decode --cuda-graph-backend-prefill --cuda-graph-config --cuda-graph-max-bs-prefill
--cuda-graph-max-seq-len-prefill --cuda-graph-prefill-max-context --dbo-decode-token-threshold
--dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size --decode-attention-backend
--decode-log-interval --deepep-config --deepep-dispatcher-output-dtype --deepep-mode --deepep-v2-mode
--defrag-thold --detokenizer-worker-num --disable-access-log-for-endpoints --dist-timeout
--distributed-timeout-seconds --dp-sync-interval --dsa-decode-backend --dsa-paged-mqa-logits-backend
--dsa-prefill-backend --dsa-topk-backend --dsv4-attn-backend --dsv4-prefill-backend
--dynamic-batch-tokenizer-batch-size --dynamic-batch-tokenizer-batch-timeout --elastic-ep-backend
--encoder-transfer-backend --ep-dispatch-algorithm --ep-num-redundant-experts --eplb-algorithm --eplb-config
--eplb-min-rebalancing-utilization-threshold --eplb-rebalance-layers-per-chunk --eplb-rebalance-num-iterations
--expert-balancedness-report-mode --expert-distribution-recorder-buffer-size --expert-distribution-recorder-mode
--expert-placement-strategy --export-metrics-to-file-dir --fault-tolerance-config --fit --fit-ctx --fit-target
--flash-attn --flashinfer-a2a-dispatch-type --flashinfer-allreduce-fusion-backend --flashinfer-autotune-skip-ops
--flashinfer-mxfp4-moe-precision --forward-pass-metrics-ipc-name --forward-pass-metrics-worker-id
--fp4-gemm-backend --fp8-gemm-backend --fuseep-mode --gc-warning-threshold-secs --gdn-prefill-backend
--generation-tokens-buckets --grammar-backend --h11-max-header-count --h11-max-incomplete-event-size
--hicache-host-memory-mode --hicache-io-backend --hicache-mem-layout --hicache-storage-prefetch-policy
--hicache-write-policy --http2-initial-connection-window-size --http2-max-concurrent-streams --hybrid-kvcache-ratio
--image-processor-backend --init-expert-location --ir-op-priority --jit-monitor-mode --kda-decode-backend
--kda-prefill-backend --keep --kernel-config --kv-cache-metrics-sample --lazy-mode --linear-attn-backend
--linear-attn-decode-backend --linear-attn-prefill-backend --linear-attn-verify-backend --linear-backend
--linear-replayssm-cache-len --load-balance-method --load-mode --load-snapshot-publish-interval --log-colors
--log-config-file --log-level-http --log-requests-format --log-requests-level --logging-config
--lora-backend --lora-drain-wait-threshold --lora-eviction-policy --main-gpu --mamba-backend --mamba-block-size
--mamba-cache-mode --mamba-full-memory-ratio --mamba-max-states-per-path --mamba-radix-cache-strategy
--mamba-scheduler-strategy --mamba-ssu-algorithm --mamba-track-interval --max-log-len --max-lora-chunk-size
--max-mamba-cache-size --max-parallel-loading-workers --max-prefill-tokens --min-free-slots-delay
--mm-attention-backend --mm-encoder-attn-backend --mm-encoder-tp-mode --mm-feature-transport
--mm-global-cache-backend --mm-hasher-algorithm --mm-io-worker-num --mm-ipc-gpu-memory-gb
--mm-preprocess-cache-size-mb --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-device
--mm-processor-worker-num --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model-loader-extra-config
--moe-a2a-backend --moe-backend --moe-runner-backend --mooncake-ib-device --mtmd-batch-max-tokens --nccl-port
--nsa-decode-backend --nsa-prefill-backend --num-continuous-decode-steps --num-reserved-decode-tokens --numa
--numa-node --optimization-level --override-tensor --performance-mode --piecewise-cuda-graph-compiler
--piecewise-cuda-graph-max-tokens --ple-offload-backend --ple-offload-dir --poll --poll-batch
--pp-async-batch-depth --pp-max-micro-batch-size --prefill-attention-backend --prefill-decode-interval
--prefill-decode-interval-min-bs --prefill-delayer-max-delay-ms --prefill-delayer-max-delay-passes
--prefill-delayer-queue-min-ratio --prefill-delayer-token-usage-low-watermark --prefill-max-requests
--prefill-schedule-interval --prefix-cache-retention-interval --prefix-match-unit --prio --prio-batch
--priority-scheduling-preemption-threshold --profiler-config --prompt-tokens-buckets --pt-load-map-location
--radix-cache-backend --radix-eviction-policy --radix-eviction-policy-config --renderer-num-workers
--replayssm-buffer-len --retraction-policy --safetensors-load-strategy --safetensors-prefetch-block-size
--safetensors-prefetch-num-threads --sampling-backend --schedule-conservativeness --scheduler-recv-interval
--show-hidden-metrics-for-version --sleep-mode-backend --slot-prompt-similarity --sm-group-num
--soft-watchdog-timeout --sparse-indexer-topk-backend --spec-draft-cpu-mask --spec-draft-cpu-range
--spec-draft-device --spec-draft-n-min --spec-draft-ngl --spec-draft-p-min --spec-draft-p-split
--spec-draft-threads --spec-draft-threads-batch --spec-ngram-map-k-min-hits --spec-ngram-map-k-size-m
--spec-ngram-map-k-size-n --spec-ngram-map-k4v-min-hits --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-size-n
--spec-ngram-min-hits --spec-ngram-mod-n-match --spec-ngram-mod-n-max --spec-ngram-mod-n-min
--spec-ngram-simple-min-hits --spec-ngram-simple-size-m --spec-ngram-simple-size-n --spec-ngram-size-m
--spec-ngram-size-n --speculative-adaptive-config --speculative-attention-mode --speculative-draft-attention-backend
--speculative-draft-load-format --speculative-dsa-topk-backend --speculative-eagle-topk
--speculative-moe-a2a-backend --speculative-moe-runner-backend --speculative-ngram-capacity
--speculative-ngram-match-type --speculative-ngram-max-bfs-breadth --speculative-ngram-max-trie-depth
--speculative-ngram-min-bfs-breadth --speculative-token-map --split-mode --startup-weight-load-mode
--structured-outputs-config --swa-checkpoints --swa-full-tokens-ratio --tags --tbo-token-distribution-threshold
--tensor-split --threads-batch --threads-batch-draft --threads-draft --threads-http --tokenizer-backend
--tokenizer-worker-num --torch-compile-max-bs --triton-attention-num-kv-splits --triton-attention-split-tile-size
--ubatch-size --warmups --watchdog-config --watchdog-timeout --weight-cache-mode --weight-cache-socket
--weight-cache-timeout --weight-loader-prefetch-num-threads --weight-version
--cache-type-k-draft --cache-type-v-draft --context-bucket --cpu-mask-batch-draft --cpu-mask-draft --cpu-range-draft
--cpu-strict-batch-draft --cpu-strict-draft --disaggregation-decode-allocation-policy
--disaggregation-decode-extra-slots --disaggregation-decode-host-receive-threshold
--disaggregation-decode-polling-interval --disaggregation-decode-retraction-backup
--dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s
--elastic-ep-scale-timeout --engine-info-bootstrap-port --extra-metric-labels --gated-launch-port
--gpu-layers-draft --grpc-http-sidecar-port --grpc-response-timeout-secs
--hicache-storage-prefetch-retry-max-attempts --hicache-storage-prefetch-retry-poll-interval
--int8-mamba-ckpt-size --kv-canary-sweep-interval --lmcache-config-file --lookup-cache-dynamic --lookup-cache-static
--mamba-cache-philox-rounds --mm-encoder-attn-dtype --monokernel-backend --n-cpu-moe-draft --n-gpu-layers-draft
--nsa-prefill-cp-mode --override-tensor-draft --paged-experts-num-resident --pdmux-config-path --poll-batch-draft
--poll-draft --prefill-cp-mode --prefill-kv-cache-dequant-dtype --prio-batch-draft --prio-draft --qsa-indexer-dtype
--shared-experts-tp-size --smg-http-sidecar-port --spec-draft-cpu-mask-batch --spec-draft-cpu-strict
--spec-draft-cpu-strict-batch --spec-draft-n-cpu-moe --spec-draft-ncmoe --spec-draft-override-tensor
--spec-draft-poll --spec-draft-poll-batch --spec-draft-prio --spec-draft-prio-batch --spec-draft-type-k
--spec-draft-type-v --speculative-dflash-block-size --speculative-domino-candidate-pool-size
--speculative-draft-kv-cache-dtype --speculative-draft-model-quantization --speculative-draft-sink-size
--speculative-draft-window-size --speculative-dspark-block-size --speculative-dspark-confidence-sts-path
--speculative-dspark-sps-table-path --swa-prefix-tails --video-ffmpeg-dir --ui-config --ui-config-file --webui-config
--webui-config-file -Cbd -Cd -Crd -ctkd -ctvd -lcd -lcs -ncmoed -ngld -otd
--draft-min --draft-n-min --draft-p-min --draft-p-split --fp4-gemm-runner-backend --fp8-gemm-runner-backend
--mmproj-device -mmdev
-C -Cb -Cr -Crb -O -ac -cc -cms -cram -ctxcp -dt -fa -fit -fitc -fitt -lm -lzm -mg -ot -sm -sps -tb -tbd -td -ts -ub
"""

_WITH_LIST: Final = """
--cuda-graph-bs --cuda-graph-bs-decode --cuda-graph-bs-prefill --cudagraph-capture-sizes --custom-histogram-buckets
--gc-threshold --log-requests-target --numa-bind-cpus --numa-bind-nodes --piecewise-cuda-graph-tokens
--prefill-delayer-forward-passes-buckets --prefill-delayer-wait-seconds-buckets
--tokenizer-metrics-allowed-custom-labels --trace-modules --uvicorn-access-log-exclude-prefixes
"""

SWITCHES: Final = frozenset(_SWITCHES.split())
"""The flags without effect that take no value. Each also has a form that begins with `--no-`."""

WITH_VALUE: Final = frozenset(_WITH_VALUE.split())
"""The flags without effect that take one value."""

WITH_LIST: Final = frozenset(_WITH_LIST.split())
"""The flags without effect that take any number of values."""


def has_no_effect(flag: str) -> bool:
    """Return whether a flag is accepted with every value and changes nothing."""
    positive = f"--{flag[5:]}" if flag.startswith("--no-") else flag
    return bool({flag, positive} & SWITCHES) or flag in WITH_VALUE or flag in WITH_LIST
