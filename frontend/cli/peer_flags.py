"""Flags of other servers that `engine serve` recognizes but does not implement."""

from __future__ import annotations

IGNORED = (
    "--trust-remote-code",
    "--no-trust-remote-code",
    "--disable-uvicorn-access-log",
)
"""Flags that are accepted and ignored because they match Engine's behavior: code from a model repository never runs,
and there is no access log.
"""

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
"""Flags that are accepted only with the values that match Engine's behavior."""

# fmt: off
UNSUPPORTED = frozenset({
    "--chat-template-kwargs", "--compilation-config", "--cuda-graph-sizes",
    "--data-parallel-address", "--data-parallel-backend", "--data-parallel-rank",
    "--data-parallel-rpc-port", "--data-parallel-size-local", "--data-parallel-start-rank",
    "--default-chat-template-kwargs", "--disable-cascade-attn", "--disable-custom-all-reduce",
    "--disable-hybrid-kv-cache-manager", "--disable-sliding-window", "--enable-dbo",
    "--enable-eplb", "--enable-expert-parallel", "--enable-lora", "--enable-prompt-embeds",
    "--enable-return-routed-experts", "--enable-server-load-tracking", "--enable-sleep-mode",
    "--enable-ssl-refresh",
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
    "--reasoning-parser-plugin",
    "--skip-mm-profiling",
    "--speculative-model", "--ssl-ca-certs", "--ssl-cert-reqs",
    "--ssl-ciphers", "--structured-outputs-config", "--tokenizer-revision",
    "--tool-parser-plugin", "--tool-server", "--use-tqdm-on-load", "--use-v2-block-manager",
    "--video-pruning-rate", "--watermark", "--worker-cls", "--worker-extension-cls", "-O", "-ngl",
})
# fmt: on
"""Flags of other servers that are rejected by name, so that nobody assumes that they work."""
