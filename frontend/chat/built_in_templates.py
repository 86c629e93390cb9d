"""Chat templates for models that are published without one."""

from __future__ import annotations

from typing import Final

_DEEPSEEK_V4: Final = """
{%- set thinks = thinking if thinking is defined else enable_thinking is not defined or enable_thinking %}
{%- set turns = namespace(last_question=-1, is_open=false) %}
{%- for message in messages %}
    {%- if message.role in ("user", "tool") %}{% set turns.last_question = loop.index0 %}{% endif %}
{%- endfor %}
{%- macro explain_tools() %}
    {{- "\\n\\n## Tools\\n\\nThese tools are available. To call some of them, write a block in this form:\\n\\n" }}
    {{- '<｜DSML｜tool_calls>\\n<｜DSML｜invoke name="NAME">\\n<｜DSML｜parameter name="PARAMETER" string="true|false">' }}
    {{- "VALUE</｜DSML｜parameter>\\n...\\n</｜DSML｜invoke>\\n...\\n</｜DSML｜tool_calls>\\n\\n" }}
    {{- 'Write the value of a string as it is, with string="true", and any other value as JSON, with string="false". ' }}
    {{- "Finish all reasoning, between <think> and </think>, before the first call.\\n\\n" }}
    {{- "### Available Tool Schemas\\n\\n" }}
    {%- for tool in tools %}{{ tool.function | tojson }}{{ "\\n" }}{% endfor %}
{%- endmacro %}
{{- bos_token }}
{%- if tools and messages[0].role != "system" %}{{ explain_tools() }}{% endif %}
{%- for message in messages %}
    {%- set keeps_reasoning = thinks and (tools or loop.index0 > turns.last_question) %}
    {%- if message.role == "system" %}
        {{- message.content }}
        {%- if tools and loop.first %}{{ explain_tools() }}{% endif %}
    {%- elif message.role in ("user", "tool") %}
        {{- "\\n\\n" if turns.is_open else "<｜User｜>" }}
        {{- "<tool_result>" ~ message.content ~ "</tool_result>" if message.role == "tool" else message.content }}
        {%- set turns.is_open = true %}
    {%- else %}
        {{- "<｜Assistant｜>" ~ ("<think>" if keeps_reasoning else "</think>") }}
        {%- if keeps_reasoning %}{{ (message.reasoning_content or "") ~ "</think>" }}{% endif %}
        {{- message.content or "" }}
        {%- if message.tool_calls %}
            {{- "\\n\\n<｜DSML｜tool_calls>\\n" }}
            {%- for call in message.tool_calls %}
                {{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\\n' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- '<｜DSML｜parameter name="' ~ name ~ '" string="' ~ ("true" if value is string else "false") }}
                    {{- '">' ~ (value if value is string else value | tojson) ~ "</｜DSML｜parameter>\\n" }}
                {%- endfor %}
                {{- "</｜DSML｜invoke>\\n" }}
            {%- endfor %}
            {{- "</｜DSML｜tool_calls>" }}
        {%- endif %}
        {{- eos_token }}
        {%- set turns.is_open = false %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<｜Assistant｜>" ~ ("<think>" if thinks else "</think>") }}{% endif %}
"""

_CONTENTS: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"

BUILT_IN_TEMPLATES: Final = {
    "clip": _CONTENTS,
    "clip_text_model": _CONTENTS,
    "deepseek_ocr": "{{ bos_token }}" + _CONTENTS,
    "deepseek_v4": _DEEPSEEK_V4.strip(),
    "siglip": _CONTENTS,
    "siglip_text_model": _CONTENTS,
}
"""Model type -> the template. Markers are those that the model was trained with; the explanation of tools is ours."""
