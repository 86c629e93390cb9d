"""The names that other servers use for the formats of tool calls and reasoning."""

from __future__ import annotations

from typing import Final

TOOL_CALL_PARSERS_OF_SGLANG: Final = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "glm": "glm45",
    "gpt-oss": "openai",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "hunyuan": "hunyuan_a13b",
}
"""SGLang's name of a format of tool calls -> the name in Engine and vLLM."""

TOOL_CALL_PARSERS_OF_VLLM: Final = {
    "ernie45": "hermes",
    "jamba": "hunyuan_a13b",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "qwen3_json": "hermes",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
}
"""vLLM's name of a format of tool calls -> the name in Engine, if it has another."""

REASONING_PARSERS_OF_SGLANG: Final = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v4": "deepseek_v4",
    "qwen3-thinking": "qwen3",
    "minimax": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "gpt-oss": "openai_gptoss",
}
"""SGLang's name of a format of reasoning -> the name in Engine and vLLM."""

REASONING_PARSERS_OF_VLLM: Final = {
    "glm47": "glm45",
    "holo2": "qwen3",
    "hy_v3": "qwen3",
    "mimo": "qwen3",
    "nemotron_v3": "qwen3",
    "olmo3": "deepseek_r1",
    "poolside_v1": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
    "step5": "qwen3",
}
"""vLLM's name of a format of reasoning -> the name in Engine, if it has another."""
