"""A chat template that shows everything that a template can see, so that an echo is the whole prompt."""

from __future__ import annotations

import json

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS = "".join(
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': {'city': city}})}\n</tool_call>"
    for city in ("Oslo", "Rome")
)
ANSWER = f"<think>\nLet me see.\n</think>\n\nI look it up.\n{CALLS}"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TEMPLATE = (
    "{% if messages[-1]['role'] == 'user' and messages | length == 1 %}"
    "{{ messages[0]['content'] }}"
    "{% else %}{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}"
    "{% if m['reasoning_content'] %}|{{ m['reasoning_content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}|{{ c['id'] }} {{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}"
    "{% endfor %}{% if m['tool_call_id'] %}|{{ m['tool_call_id'] }}{% endif %}]"
    "{% endfor %}{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}{% endif %}"
)
