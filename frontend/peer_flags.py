"""Flags of the peers that `engine serve` knows and does not offer: each is ignored or refused, by name."""

from __future__ import annotations

IGNORED = (
    "--trust-remote-code",
    "--no-trust-remote-code",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
)
"""Accepted and ignored, because it is always so: code from a model repository never runs, and there are no periodic
statistics and no access log."""

ONLY_VALUE: dict[str, tuple[str, ...]] = {
    "--config-format": ("auto", "hf"),
    "--cpu-offload-gb": ("0", "0.0"),
    "--guided-decoding-backend": ("auto", "guidance"),
    "--kv-offloading-backend": ("native",),
    "--logprobs-mode": ("raw_logprobs",),
    "--model-impl": ("auto",),
    "--runner": ("generate", "auto"),
    "--task": ("generate", "auto"),
    "--tokenizer-mode": ("auto", "hf"),
}
"""Flags of which this version offers what it does in any case, under these names."""

# fmt: off
UNSUPPORTED = frozenset({
    "--chat-template-kwargs", "--compilation-config", "--cuda-graph-sizes",
    "--data-parallel-address", "--data-parallel-backend", "--data-parallel-rank",
    "--data-parallel-rpc-port", "--data-parallel-size-local", "--data-parallel-start-rank",
    "--default-chat-template-kwargs", "--disable-cascade-attn", "--disable-custom-all-reduce",
    "--disable-hybrid-kv-cache-manager", "--disable-sliding-window", "--enable-dbo",
    "--enable-eplb", "--enable-expert-parallel", "--enable-lora", "--enable-prompt-embeds",
    "--enable-return-routed-experts", "--enable-server-load-tracking", "--enable-sleep-mode",
    "--enable-ssl-refresh", "--enable-tokenizer-info-endpoint",
    "--exclude-tools-when-tool-choice-none", "--fully-sharded-loras", "--gpu-layers",
    "--hf-config-path", "--io-processor-plugin",
    "--kv-cache-dtype-skip-layers",
    "--kv-sharing-fast-prefill", "--kv-transfer-config",
    "--limit-mm-per-prompt", "--log-config-file", "--log-request-details",
    "--logits-processor-pattern", "--logits-processors", "--lora-dtype",
    "--lora-modules", "--mamba-block-size", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype",
    "--max-cpu-loras", "--max-log-len",
    "--max-lora-rank", "--max-loras", "--max-parallel-loading-workers", "--max-seq-len-to-capture", "--middleware",
    "--mm-encoder-tp-mode", "--mm-processor-cache-gb", "--mm-processor-kwargs",
    "--model-loader-extra-config", "--multi-step-stream-outputs", "--n-gpu-layers",
    "--num-lookahead-slots", "--num-scheduler-steps", "--num-speculative-tokens",
    "--optimization-level", "--otlp-traces-endpoint", "--override-attention-dtype",
    "--override-pooler-config", "--pooler-config", "--ray-workers-use-nsight",
    "--reasoning-parser-plugin", "--return-tokens-as-token-ids", "--scheduler-cls",
    "--skip-mm-profiling", "--skip-tokenizer-init",
    "--speculative-model", "--ssl-ca-certs", "--ssl-cert-reqs",
    "--ssl-ciphers", "--structured-outputs-config", "--tokenizer-revision",
    "--tool-parser-plugin", "--tool-server", "--use-tqdm-on-load", "--use-v2-block-manager",
    "--video-pruning-rate", "--watermark", "--worker-cls", "--worker-extension-cls", "-O", "-ngl",
})
# fmt: on
"""Flags of the peers that have no meaning here yet: refused by name, so that none is believed to work."""
