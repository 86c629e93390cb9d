"""The names that other servers use for the formats of tool calls and reasoning."""

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
    "apertus2509": "apertus",
    "interns1": "internlm",
    "nanbeige": "qwen3_coder",
    "spark25": "glm45",
    "trinity": "hermes",
    "deepseekv41": "deepseek_v41",
}
"""SGLang's name of a format of tool calls -> the name in Engine and vLLM."""

TOOL_CALL_PARSERS_OF_VLLM: Final = {
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "ernie45": "hermes",
    "jamba": "hunyuan_a13b",
    "ling3": "glm45",
    "mimo": "qwen3_coder",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
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
    "deepseek-v41": "deepseek_v4",
    "dots": "qwen3",
    "gigachat35": "deepseek_r1",
    "hunyuan": "hunyuan_a13b",
    "interns1": "qwen3",
    "iquest_q1": "qwen3",
    "kimi": "kimi_vl",
    "minimax-append-think": "minimax_m2_append_think",
    "nanbeige": "qwen3",
    "nemotron_3": "qwen3",
}
"""SGLang's name of a format of reasoning -> the name in Engine and vLLM."""

REASONING_PARSERS_OF_VLLM: Final = {
    "deepseek_v41": "deepseek_v4",
    "glm47": "glm45",
    "granite_thinking_parser": "qwen3",
    "holo2": "qwen3",
    "hy_v3": "qwen3",
    "hy_v4": "qwen3",
    "ling3": "glm45",
    "mimo": "qwen3",
    "minicpmv": "qwen3",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "nemotron_v3": "qwen3",
    "olmo3": "deepseek_r1",
    "poolside_v1": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
    "step5": "qwen3",
}
"""vLLM's name of a format of reasoning -> the name in Engine, if it has another."""
