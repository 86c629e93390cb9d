"""Chat templates for models that are published without one."""

from __future__ import annotations

from typing import Final

from .messages import MEDIA_MARK

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

_KIMI_K3: Final = """
{%- set thinks = thinking if thinking is defined else enable_thinking is not defined or enable_thinking %}
{%- set effort = thinking_effort or reasoning_effort or "max" %}
{%- if thinks and effort not in ("low", "medium", "high", "max") %}
    {{- raise_exception("the effort must be low, medium, high or max, got " ~ effort) }}
{%- endif %}
{%- macro tag(name) %}
    {{- "<|open|>" ~ name }}
    {%- for key, value in kwargs.items() if value is not none %}
        {{- " " ~ key ~ '="' ~ value | string | replace("&", "&amp;") | replace('"', "&quot;") ~ '"' }}
    {%- endfor %}
    {{- "<|sep|>" }}
{%- endmacro %}
{%- macro end(name) %}{{ "<|close|>" ~ name ~ "<|sep|>" }}{% endmacro %}
{%- macro finish() %}{{ end("message") ~ "<|end_of_msg|>" }}{% endmacro %}
{%- macro type_of(value) %}
    {%- if value is boolean %}boolean{% elif value is none %}null{% elif value is number %}number
    {%- elif value is string %}string{% elif value is mapping %}object{% else %}array{% endif %}
{%- endmacro %}
{%- macro result(message, name, index) %}
    {{- tag("message", role="tool", tool=name, index=index) ~ message.content ~ finish() }}
{%- endmacro %}
{%- if tools %}
    {{- tag("message", role="system", type="tool-declare") }}
    {{- "# Tools\\nHere are the available tools, described in JSONSchema.\\n\\n```json\\n" }}
    {{- tools | tojson(sort_keys=true, separators=(",", ":")) ~ "\\n```" ~ finish() }}
{%- endif %}
{%- if thinks %}
    {{- tag("message", role="system", type="thinking-effort") }}
    {{- "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), " }}
    {{- "supported values include `low`, `medium`, `high`, and `max`.\\n" }}
    {{- "Now the system is invoked with `thinking_effort=" ~ effort ~ "`." ~ finish() }}
{%- endif %}
{%- set turn = namespace(calls=[], results=[]) %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set turn.calls = message.tool_calls or [] %}
        {{- tag("message", role="assistant", name=message.name or none) }}
        {%- if thinks %}{{ tag("think") ~ (message.reasoning_content or "") ~ end("think") }}{% endif %}
        {{- tag("response") ~ (message.content or "") ~ end("response") }}
        {%- if turn.calls %}
            {{- tag("tools") }}
            {%- for call in turn.calls %}
                {{- tag("call", tool=call.function.name, index=loop.index) }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- tag("argument", key=key, type=type_of(value)) }}
                    {{- value if value is string else value | tojson }}
                    {{- end("argument") }}
                {%- endfor %}
                {{- end("call") }}
            {%- endfor %}
            {{- end("tools") }}
        {%- endif %}
        {{- finish() }}
    {%- elif message.role == "tool" %}
        {%- set turn.results = turn.results + [message] %}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {%- set ids = turn.calls | map(attribute="id") | list %}
            {%- set known = turn.results | selectattr("tool_call_id", "in", ids) | list %}
            {%- if known | length == turn.results | length %}
                {%- for call in turn.calls %}
                    {%- set index = loop.index %}
                    {%- for each in known if each.tool_call_id == call.id %}
                        {{- result(each, call.function.name, index) }}
                    {%- endfor %}
                {%- endfor %}
            {%- else %}
                {%- for each in turn.results %}
                    {%- set call = turn.calls[loop.index0] %}
                    {{- result(each, call.function.name if call is defined else each.name, loop.index) }}
                {%- endfor %}
            {%- endif %}
            {%- set turn.results = [] %}
        {%- endif %}
    {%- else %}
        {{- tag("message", role=message.role, name=message.name or none) ~ message.content ~ finish() }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- tag("message", role="assistant") ~ tag("think" if thinks else "response") }}
{%- endif %}
"""

_CONTENTS: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"

_DEEPSEEK_VL2: Final = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{{ message.content ~ "\\n\\n" }}
    {%- elif message.role == "user" %}{{ "<|User|>: " ~ message.content ~ "\\n\\n" }}
    {%- else %}{{ "<|Assistant|>: " ~ message.content ~ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|Assistant|>:" }}{% endif %}
"""

_PARTS: Final = """
{%- macro images_in(messages) %}
    {%- for message in messages if message.content is not string %}
        {%- for part in message.content or [] if part.type != "text" %}{{ "<image>" }}{% endfor %}
    {%- endfor %}
{%- endmacro %}
{%- macro text_in(messages) %}
    {%- for message in messages %}
        {%- if message.content is string %}{{ message.content }}
        {%- else %}{% for part in message.content or [] if part.type == "text" %}{{ part.text }}{% endfor %}{% endif %}
    {%- endfor %}
{%- endmacro %}
"""
"""Macros that return the marks of the images in messages, and their text."""

_FLORENCE2: Final = (
    _PARTS
    + """
{%- set tasks = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image."
} %}
{%- set tasks_with_input = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: INPUT",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate INPUT in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region INPUT",
    "<OPEN_VOCABULARY_DETECTION>": "Locate INPUT in the image.",
    "<REGION_TO_CATEGORY>": "What is the region INPUT?",
    "<REGION_TO_DESCRIPTION>": "What does the region INPUT describe?",
    "<REGION_TO_OCR>": "What text is in the region INPUT?"
} %}
{%- set given = text_in(messages) %}
{%- set text = tasks[given | trim] or given %}
{%- set chosen = namespace(text=text) %}
{%- for task, question in tasks_with_input.items() if task in text %}
    {%- set chosen.text = question | replace("INPUT", text | replace(task, "") | trim) %}
{%- endfor %}
{{- images_in(messages) ~ bos_token ~ chosen.text ~ eos_token }}
"""
)

_CHAMELEON: Final = """
{{- bos_token }}
{%- for message in messages %}
    {{- message.content ~ (eos_token if message.role == "assistant" else "<reserved08706>") }}
{%- endfor %}
"""

_MOONDREAM: Final = (
    _PARTS
    + """
{{- "<|endoftext|>" ~ images_in(messages[:1]) }}
{%- for message in messages %}
    {%- set text = text_in([message]) %}
    {%- set words = text.split() %}
    {%- if message.role == "assistant" %}{{ text }}
    {%- elif words and words[0] in ("caption", "describe") and words | length < 3 %}
        {{- "<|md_reserved_0|>describe<|md_reserved_1|>" ~ (words[1] or "normal") ~ "<|md_reserved_2|>" }}
    {%- else %}
        {{- "<|md_reserved_0|>query<|md_reserved_1|>" ~ text ~ "<|md_reserved_2|>" }}
    {%- endif %}
{%- endfor %}
"""
)

_NEMOTRON_PARSE: Final = (
    _PARTS
    + """
{%- set text = text_in(messages) | trim %}
{%- if text.startswith("</s>") %}{% set text = text[4:] %}
{%- elif not text.startswith("<s>") %}
    {%- set text = "<s>" ~ (text or "<predict_bbox><predict_classes><output_markdown>") %}
{%- endif %}
{{- (images_in(messages) or "</s>") ~ text }}
"""
)

# The text of messages is left out. A template that does not show it gets the marks of images in strings.
_IMAGES: Final = f"""
{{%- set text = messages | map(attribute="content") | join %}}
{{{{- text | select("equalto", "{MEDIA_MARK}") | join or raise_exception("send an image, whose text is read") }}}}
"""

# A caption continues the text, which follows the image.
_CAPTIONS: Final = f"""
{{%- set text = messages | map(attribute="content") | join %}}
{{{{- text | select("equalto", "{MEDIA_MARK}") | join or raise_exception("send an image, which is described") }}}}
{{{{- text | replace("{MEDIA_MARK}", " ") | trim }}}}
"""

BUILT_IN_TEMPLATES: Final = {
    "blip": _CAPTIONS.strip(),
    "chameleon": _CHAMELEON.strip(),
    "clip": _CONTENTS,
    "clip_text_model": _CONTENTS,
    **dict.fromkeys(
        ("deepseek_ocr", "deepseek_ocr2", "unlimited_ocr"), "{{ bos_token }}" + _CONTENTS
    ),
    "deepseek_vl_v2": _DEEPSEEK_VL2.strip(),
    "deepseek_v4": _DEEPSEEK_V4.strip(),
    "florence2": _FLORENCE2.strip(),
    "kimi_k3": _KIMI_K3.strip(),
    "moondream": _MOONDREAM.strip(),
    "nemotron_parse": _NEMOTRON_PARSE.strip(),
    "openvla": _CONTENTS,
    "siglip": _CONTENTS,
    "siglip_text_model": _CONTENTS,
    "trocr": _IMAGES.strip(),
}
"""Model type -> the template. Markers are those that the model was trained with; the explanation of tools is ours."""
