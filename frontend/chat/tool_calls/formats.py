"""The tool-call formats of model families (`--tool-call-parser`)."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ....protocol.config.frontend import ToolCallParserName
from .json_calls import CallKeys
from .syntax import (
    CallFormat,
    ElementNotation,
    GemmaNotation,
    JsonObject,
    NamedCall,
    PythonExpression,
    TaggedNotation,
)
from .tagged_arguments import Tags
from .tools import NewId, kimi_call_id, mistral_call_id, openai_call_id


def _sections(
    opening: str, closing: str, call: NamedCall, new_id: NewId = openai_call_id
) -> CallFormat:
    """Return a format whose calls have their own markers. Models may omit the opening of a block."""
    return CallFormat((opening, call.before), (call,), closing, new_id=new_id)


def _tagged(opening: str, closing: str, before: str, tags: Tags) -> CallFormat:
    """Return a format of blocks with calls `before NAME tagged-arguments`."""
    return _sections(
        opening,
        closing,
        NamedCall(TaggedNotation(tags, (tags.start, *filter(None, (tags.empty,)))), before=before),
    )


def _dsml(block: str, *loose: str, mark: str = "｜DSML｜") -> CallFormat:
    """Return DeepSeek's format. Its tags begin with `mark`; `block` or one of `loose` opens a block of calls."""
    tags = Tags(
        f'<{mark}parameter name="',
        ">",
        f"</{mark}parameter>",
        start='">',
        end=f"</{mark}invoke>",
        empty='"/>',
        typed=(('" string="true"', True), ('" string="false"', False)),
        may_be_json=True,
    )
    format = _tagged(f"<{mark}{block}>", f"</{mark}{block}>", f'<{mark}invoke name="', tags)
    return replace(format, openings=(*format.openings, *(f"<{mark}{name}>" for name in loose)))


_HERMES: Final = CallFormat(("<tool_call>",), (JsonObject(),), "</tool_call>")
_LLAMA3_JSON: Final = CallFormat(
    ("<|python_tag|>",), (JsonObject(needs_arguments=True),), bare=True
)
_PYTHONIC: Final = CallFormat(
    ("<|python_start|>",), (PythonExpression(),), "<|python_end|>", bare=True
)
_QWEN3_CODER: Final = _tagged(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    Tags("<parameter=", ">", "</parameter>", start=">", end="</function>", has_newlines=True),
)
_ARG_TAGS: Final = Tags("<arg_key>", "</arg_key>", "</arg_value>", value_before="<arg_value>")


def _glm(block: str) -> CallFormat:
    """Return the format of GLM with this name of a block, which is one call."""
    end = f"</{block}>"
    call = NamedCall(TaggedNotation(_ARG_TAGS, first=("<arg_key>", end)))
    return CallFormat((f"<{block}>",), (call,), end)


_GLM: Final = _glm("tool_call")
_INVOKE: Final = Tags('<parameter name="', '">', "</parameter>", start='">', end="</invoke>")

_MINIMAX_MARK: Final = "]<]minimax[>["


def hy_v4_format(suffix: str = "") -> CallFormat:
    """Return the format of Hunyuan 4, whose tags end with a suffix that differs between checkpoints."""
    tags = Tags(
        f"<arg_key{suffix}>",
        f"</arg_key{suffix}>",
        f"</arg_value{suffix}>",
        value_before=f"<arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
    )
    call = NamedCall(
        TaggedNotation(tags, first=(tags.key_before, tags.end)), before=f"<tool_call{suffix}>"
    )
    return _sections(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", call)


FORMATS: Final[dict[ToolCallParserName, CallFormat]] = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "granite4": _HERMES,
    "granite": CallFormat(("<|tool_call|>", "<tool_call>"), (JsonObject(),), "</tool_call>"),
    "llama3_json": _LLAMA3_JSON,
    "llama4_json": _LLAMA3_JSON,
    "hunyuan_a13b": CallFormat(("<tool_calls>",), (JsonObject(),), "</tool_calls>"),
    "longcat": CallFormat(("<longcat_tool_call>",), (JsonObject(),), "</longcat_tool_call>"),
    "nemotron_json": CallFormat(("<TOOLCALL>",), (JsonObject(),), "</TOOLCALL>"),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        (
            JsonObject(),
            NamedCall(suffix=r"\s*\[CALL_ID\]\s*\w+", after="[ARGS]", is_after_optional=True),
        ),
        new_id=mistral_call_id,
    ),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "lfm2": CallFormat(
        ("<|tool_call_start|>",), (JsonObject(), PythonExpression()), "<|tool_call_end|>"
    ),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _tagged(
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=",
        Tags("<parameter=", ">", "</parameter>", start=">", end="</function>"),
    ),
    "minimax_m2": _tagged(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="',
        _INVOKE,
    ),
    "dots": CallFormat(
        ("<dots_function_call>",),
        (
            NamedCall(TaggedNotation(_INVOKE, first=('">',)), before='<invoke name="'),
            JsonObject(),
        ),
        "</dots_function_call>",
    ),
    "muse": _tagged(
        "<atem:function_calls>",
        "</atem:function_calls>",
        '<atem:invoke name="',
        Tags(
            '<atem:parameter name="',
            '">',
            "</atem:parameter>",
            start='">',
            end="</atem:invoke>",
        ),
    ),
    "minicpm5": CallFormat(
        ('<function name="',),
        (
            NamedCall(
                TaggedNotation(
                    Tags(
                        '<param name="',
                        '">',
                        "</param>",
                        start='">',
                        end="</function>",
                        wrapping=("<![CDATA[", "]]>"),
                    ),
                    first=('">',),
                ),
                before='<function name="',
            ),
        ),
    ),
    "minimax_m3": _sections(
        f"{_MINIMAX_MARK}<tool_call>",
        f"{_MINIMAX_MARK}</tool_call>",
        NamedCall(
            ElementNotation(_MINIMAX_MARK, '">', "</invoke>"),
            before=f'{_MINIMAX_MARK}<invoke name="',
        ),
    ),
    "hy_v4": hy_v4_format(),
    "glm45": _GLM,
    "glm47": _GLM,
    "iquest_q1": _glm("iquest_tool_call"),
    "k2_horizon": _sections(
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        NamedCall(
            TaggedNotation(
                Tags(
                    "<ifm|arg_key>",
                    "</ifm|arg_key>",
                    "</ifm|arg_value>",
                    value_before="<ifm|arg_value>",
                    end="</ifm|tool_call>",
                ),
                first=("<ifm|arg_key>", "</ifm|tool_call>"),
            ),
            before="<ifm|tool_call>",
        ),
    ),
    "kimi_k2": _sections(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        NamedCall(
            before="<|tool_call_begin|>",
            prefix="functions.",
            suffix=r":\d+",
            writes_suffix=True,
            after="<|tool_call_argument_begin|>",
            ends=("<|tool_call_end|>",),
        ),
        new_id=kimi_call_id,
    ),
    "kimi_k3": _sections(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        NamedCall(
            TaggedNotation(
                Tags(
                    '<|open|>argument key="',
                    "<|sep|>",
                    "<|close|>argument<|sep|>",
                    end="<|close|>call<|sep|>",
                    typed=tuple(
                        (f'" type="{name}"', name == "string")
                        for name in ("string", "number", "boolean", "null", "object", "array")
                    ),
                    is_escaped=True,
                ),
                first=('<|open|>argument key="', "<|close|>call<|sep|>"),
            ),
            before='<|open|>call tool="',
            suffix=r'" index="\d+"',
            writes_suffix=True,
            after="<|sep|>",
        ),
    ),
    "deepseek_v3": _sections(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall(
            before="<｜tool▁call▁begin｜>",
            prefix="function<｜tool▁sep｜>",
            after="\n```json\n",
            is_after_optional=True,
            ends=("\n```", "<｜tool▁call▁end｜>"),
        ),
    ),
    "deepseek_v31": _sections(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall(
            before="<｜tool▁call▁begin｜>",
            after="<｜tool▁sep｜>",
            ends=("<｜tool▁call▁end｜>",),
        ),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls", "toolcalls", "tool"),
    "deepseek_v41": _dsml("calls", mark="｜DSML｜ "),
    "gigachat35": _dsml("tool_calls", mark="｜GCML｜"),
    "gemma4": CallFormat(
        ("<|tool_call>",),
        (NamedCall(GemmaNotation('<|"|>'), prefix="call:"),),
        "<tool_call|>",
    ),
    "functiongemma": CallFormat(
        ("<start_function_call>",),
        (NamedCall(GemmaNotation("<escape>"), prefix="call:"),),
        "<end_function_call>",
    ),
    "openai": CallFormat(
        ("<|channel|>commentary to=functions.",),
        (NamedCall(suffix=r"\s*<\|constrain\|>\s*\w+|\s+\w+", after="<|message|>"),),
        "<|call|>",
    ),
    "phi4_mini_json": CallFormat(("functools",), (JsonObject(),)),
    "internlm": CallFormat(("<|action_start|><|plugin|>",), (JsonObject(),), "<|action_end|>"),
    "apertus": CallFormat(
        ("<|tools_prefix|>",), (JsonObject(CallKeys(name="")),), "<|tools_suffix|>"
    ),
    "cohere_command": CallFormat(
        ("<|START_ACTION|>",),
        (JsonObject(CallKeys("tool_name", ("parameters",), "tool_call_id")),),
        "<|END_ACTION|>",
    ),
    "inkling": CallFormat(
        ("<|content_invoke_tool_json|>",),
        (JsonObject(CallKeys(arguments=("args",))),),
        "<|end_message|>",
    ),
    "plamo3": _sections(
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
        NamedCall(
            before="<|plamo:begin_tool_request:plamo|>",
            prefix="<|plamo:begin_tool_name:plamo|>",
            after="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
            "<|plamo:constrain|>json<|plamo:msg|>",
            ends=("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>"),
        ),
    ),
    "granite-20b-fc": CallFormat(("<function_call>",), (JsonObject(),)),
    "gigachat3": CallFormat(
        ("<|function_call|>", "function call<|role_sep|>"), (JsonObject(),), "<|message_sep|>"
    ),
    "xlam": CallFormat(
        ("<tool_call>", "[TOOL_CALLS]", "```json"),
        (JsonObject(needs_arguments=True),),
        "</tool_call>",
        bare=True,
    ),
    "olmo3": CallFormat(("<function_calls>",), (PythonExpression(),), "</function_calls>"),
    "step3": _sections(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        NamedCall(
            TaggedNotation(
                Tags(
                    '<steptml:parameter name="',
                    '">',
                    "</steptml:parameter>",
                    start='">',
                    end="</steptml:invoke>",
                ),
                first=('">',),
            ),
            before="<｜tool_call_begin｜>",
            lead="function<｜tool_sep｜>",
            prefix='<steptml:invoke name="',
            ends=("<｜tool_call_end｜>",),
        ),
    ),
    "hy_v3": _sections(
        "<tool_calls>",
        "</tool_calls>",
        NamedCall(
            TaggedNotation(
                replace(_ARG_TAGS, start="<tool_sep>", end="</tool_call>"),
                first=("<tool_sep>",),
            ),
            before="<tool_call>",
        ),
    ),
    "generic": _HERMES,
}
"""Name of `--tool-call-parser` -> the format."""
