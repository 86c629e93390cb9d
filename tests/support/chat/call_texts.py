"""Texts that models write, and the content and the tool calls in them."""

from __future__ import annotations

from typing import Any

NESTED = '{"city": "Köln \\"x\\" {[", "days": [1, {"a": null}], "ok": true}'

FUNCTIONS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["a", "w"]},
            "lines": {"type": "integer"},
            "force": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "shared": {"$ref": "#/$defs/shared"},
            "deep": {"type": "object"},
        },
        "$defs": {"shared": {"type": "string"}},
    }
}

M3 = "]<]minimax[>["

PLAMO = (
    "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>%s"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>%s"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
)

CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", "Just text, 1 < 2.\n", "Just text, 1 < 2.\n", []),
    ("hermes", "", None, []),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": ' + NESTED + "}\n</tool_call>",
        "Let me see.",
        [("f", NESTED)],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>\n',
        None,
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', " done", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        None,
        [("f", '{"a": "b')],
    ),
    ("hermes", "<tool_call> not json </tool_call>", "<tool_call> not json </tool_call>", []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": bad, "arguments": {}}</tool_call>',
        '<tool_call>{"name": bad, "arguments": {}}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f\\ud800", "arguments": "\\x"}</tool_call>',
        None,
        [("f?", '"\\x"')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": .{"a": 1}}', None, [("f", '.{"a": 1}')]),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", "a <tool_call>", "a <tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and more</tool_call>end',
        "end",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call> done',
        " done",
        [("f", '{"a": "</tool_call>"}'), ("g", '{"b": 2}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1]</tool_call> then '
        '<tool_call>{"name": "g", "arguments": {}}<tool_call>{"name": "h", "arguments": {}}',
        " then",
        [("f", '{"a": [1]'), ("g", "{}"), ("h", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"<tool_call>{"name": "g"}</tool_call>',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"</tool_call><tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"name": "f"</tool_call>',
        [("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" < 1}}', None, [("f", '{"a" < 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": <', None, [("f", '{"a": <')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\', None, [("f", '{"a": "\\')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": ' + NESTED + "}",
        None,
        [("f", NESTED)],
    ),
    (
        "llama3_json",
        '\n<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        None,
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}<|python_tag|>{"name": "g", "parameters": {}} end',
        " end",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '{"answer": 42, "name": "x"}', '{"answer": 42, "name": "x"}', []),
    ("llama3_json", "[a list](of links) { }", "[a list](of links) { }", []),
    ("llama3_json", '{"a": {"name": "f", "parameters": {}}}', '{"a": {"name": "f", "parameters": {}}}', []),
    ("llama3_json", 'Text {"name": "f", "parameters": {}}', 'Text {"name": "f", "parameters": {}}', []),
    ("llama3_json", "  plain", "  plain", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        "Sure.[TOOL_CALLS]f{" + '"a": [1]}[TOOL_CALLS]get_it[ARGS]{"b": {}}',
        "Sure.",
        [("f", '{"a": [1]}'), ("get_it", '{"b": {}}')],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": 1}', None, [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]f{"a": [1, 2[TOOL_CALLS][{"name": "g", "arguments": {"b": []}}]',
        None,
        [("f", '{"a": [1, 2'), ("g", '{"b": []}')],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": [', None, [("f", '{"a": [')]),
    ("mistral", "[TOOL_CALLS] oh no, nothing", "[TOOL_CALLS] oh no, nothing", []),
    ("mistral", "[TOOL_CALLS]" + "x" * 400, "[TOOL_CALLS]" + "x" * 400, []),
    ("mistral", "a [1] list [TOOL", "a [1] list [TOOL", []),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', None, [("f", "{}")]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}]<|tool_call|>[{"name": "g"}]</tool_call>.',
        ".",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "pythonic",
        "[weather(city='Köln', days=[1, 2], deep={'a': None, 'b': (True, -1.5)}), now()]",
        None,
        [("weather", '{"city": "Köln", "days": [1, 2], "deep": {"a": null, "b": [true, -1.5]}}'),
         ("now", "{}")],
    ),
    ("pythonic", "<|python_start|>[a.b(x=1)]<|python_end|>", None, [("a.b", '{"x": 1}')]),
    ("pythonic", "[f(x='a, b)]\\'', y=\"(\"),]", None, [("f", '{"x": "a, b)]\'", "y": "("}')]),
    (
        "pythonic",
        "[f(a=true, b=[null, {'c': false, null: 'true'}]), true(x=-1)]",
        None,
        [("f", '{"a": true, "b": [null, {"c": false, "null": "true"}]}'), ("true", '{"x": -1}')],
    ),
    ("pythonic", "[f(x=nil)]", "[f(x=nil)]", []),
    ("pythonic", "[f(x=1)] then", " then", [("f", '{"x": 1}')]),
    (
        "pythonic",
        "See [f(x=1)] and [1]:\n[write(path='a'), g(x=2)] done [write(",
        "See [f(x=1)] and [1]:\n done [write(",
        [("write", '{"path": "a"}'), ("g", '{"x": 2}')],
    ),
    ("pythonic", "See [write(1)] x", "See [write(1)] x", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(x=open('a'))]", "[f(x=open('a'))]", []),
    ("pythonic", "[f(x=1), oops]", ", oops]", [("f", '{"x": 1}')]),
    ("pythonic", "[f(x=1), g(", None, [("f", '{"x": 1}')]),
    ("pythonic", "[f(x=1", "[f(x=1", []),
    ("pythonic", "[link](url) text ", "[link](url) text ", []),
    ("pythonic", "(a) [b]", "(a) [b]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("lfm2", "Hm. <|tool_call_start|>[f(a='x', b=[1]), g()]<|tool_call_end|>Done."
     '<|tool_call_start|>[{"name": "h", "arguments": {"c": 1}}]<|tool_call_end|>', "Hm. Done.",
     [("f", '{"a": "x", "b": [1]}'), ("g", "{}"), ("h", '{"c": 1}')]),
    ("lfm2", "<|tool_call_start|>[1, 2]<|tool_call_end|>", "<|tool_call_start|>[1, 2]<|tool_call_end|>",
     []),
    (
        "qwen3_coder",
        "I write.\n<tool_call>\n<function=write>\n<parameter=path>\n/tmp/a \"b\"\n\n</parameter>\n"
        "<parameter=lines>\n12\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n"
        "<parameter=tags>\n['a', \"b\"]\n</parameter>\n</function>\n</tool_call>\n",
        "I write.",
        [("write", '{"path": "/tmp/a \\"b\\"\\n", "lines": 12, "force": true, "tags": ["a", "b"]}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=write>"
        "<parameter=path>x</parameter></function> ok",
        " ok",
        [("now", "{}"), ("write", '{"path": "x"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>\n</parameter> is <function=f> tag\n</parameter>"
        "<parameter=limit>none</parameter><parameter=either>12</parameter>"
        "<parameter=shared>12</parameter><parameter=lines>many</parameter>"
        "<parameter=other>[1]</parameter><parameter=rest>text</parameter></tool_call>.",
        ".",
        [("write", '{"path": "</parameter> is <function=f> tag", "limit": null, "either": 12, '
          '"shared": "12", "lines": "many", "other": [1], "rest": "text"}')],
    ),
    ("qwen3_coder", "<function=write><parameter=path>\na\\b\n</para", None,
     [("write", '{"path": "a\\\\b\\n</para')]),
    ("qwen3_coder", "<tool_call><function=write><parameter=lines>1</parameter>", None,
     [("write", '{"lines": 1')]),
    ("qwen3_coder", "<tool_call><function=f>oops</function></tool_call>", None, [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=>", "<tool_call><function=>", []),
    ("qwen3_coder", "a <function of x", "a <function of x", []),
    ("seed_oss", "<seed:tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n"
     "</seed:tool_call>", None, [("write", '{"path": "\\na\\n"}')]),
    (
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a\nb</parameter>\n'
        '<parameter name="tags">["x"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "Ok.",
        [("write", '{"path": "a\\nb", "tags": ["x"]}'), ("now", "{}")],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="f', '<minimax:tool_call><invoke name="f', []),
    (
        "minimax_m3",
        f'Ok.\n{M3}<tool_call>\n{M3}<invoke name="write">{M3}<path>a </path>\n<b>{M3}x{M3}</path>{M3}<tags>'
        f"{M3}<item>1{M3}</item> {M3}<item>b{M3}</item>{M3}</tags>{M3}<lines>3{M3}</lines>{M3}<deep>{M3}<-k>"
        f"{M3}<item>true{M3}</item>{M3}</-k>{M3}<e>{M3}</e>{M3}</deep>{M3}</invoke>\n"
        f'{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call>',
        "Ok.",
        [("write", '{"path": "a </path>\\n<b>]<]minimax[>[x", "tags": ["1", "b"], "lines": 3, '
          '"deep": {"-k": [true], "e": ""}}'), ("now", "{}")],
    ),
    # Start tags and marks of end tags that the model omits, and elements that it leaves open.
    (
        "minimax_m3",
        f'{M3}<tool_call>{M3}<invoke name="write">{M3}a.txt{M3}</path>{M3}<mode>w</mode>{M3}<tags>{M3}</tags>'
        f"{M3}</stray>{M3}<deep>{M3}<a>{M3}<b>1{M3}</b>{M3}</deep>{M3}<lines>2{M3}</tool_call>",
        None,
        [("write", '{"path": "a.txt", "mode": "w", "tags": [], "deep": {"a": {"b": 1}}, "lines": 2}')],
    ),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="write">{M3}<path>a{M3[:-1]}', None,
     [("write", f'{{"path": "a{M3[:-1]}')]),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="f', f'{M3}<tool_call>{M3}<invoke name="f', []),
    (
        "glm45",
        "\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>lines</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        None,
        [("write", '{"path": "a b", "lines": 3}'), ("now", "{}")],
    ),
    ("glm47", "<tool_call>write<arg_key>path</arg_key><arg_value></arg_value></tool_call>!", "!",
     [("write", '{"path": ""}')]),
    (
        "k2_horizon",
        "Hm.<ifm|tool_calls><ifm|tool_call>write<ifm|arg_key>path</ifm|arg_key><ifm|arg_value>a b</ifm|arg_value>"
        "<ifm|arg_key>lines</ifm|arg_key><ifm|arg_value>3</ifm|arg_value></ifm|tool_call>\n"
        "<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>",
        "Hm.",
        [("write", '{"path": "a b", "lines": 3}'), ("now", "{}")],
    ),
    (
        "glm45",
        '<tool_call>write<arg_key>tags</arg_key><arg_value>[{\\"a\\": \\"C:\\\\\\\\d\\"}]</arg_value>'
        '<arg_key>path</arg_key><arg_value>[\\"a\\"]</arg_value></tool_call>',
        None,
        [("write", r'{"tags": [{"a": "C:\\d"}], "path": "[\\\"a\\\"]"}')],
    ),
    ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
    (
        "kimi_k2",
        "Let me.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g.h:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Let me.",
        [("f", '{"a": 1}'), ("g.h", "{}")],
    ),
    ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": <|tool_call_end|>'
     '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>', None,
     [("f", '{"a": '), ("g", "{}")]),
    ("kimi_k2", "<|tool_calls_section_begin|>no<|tool_calls_section_end|>",
     "<|tool_calls_section_begin|>no<|tool_calls_section_end|>", []),
    (
        "kimi_k3",
        'Ok.<|open|>tools<|sep|>\n<|open|>call tool="write" index="1"<|sep|>'
        '<|open|>argument key="path" type="string"<|sep|>\n<a "b">\n<|close|>argument<|sep|> <|sep|>\n'
        '<|close|>argument<|sep|><|open|>argument key="lines" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="a&quot;&amp;quot;" type="object"<|sep|>{"k": [null]}<|close|>argument<|sep|>'
        '<|open|>argument key="shared" type="boolean"<|sep|>true<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>\n<|close|>tools<|sep|>',
        "Ok.",
        [("write", '{"path": "\\n<a \\"b\\">\\n<|close|>argument<|sep|> <|sep|>\\n", "lines": 3, '
          '"a\\"&quot;": {"k": [null]}, "shared": true}'), ("now", "{}")],
    ),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"'
     "<|sep|>cut<|close|>argu", None, [("f", '{"a": "cut<|close|>argu')]),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="', '<|open|>tools<|sep|><|open|>call tool="', []),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" + NESTED +
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        [("f", NESTED), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>" + NESTED + "<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        [("f", NESTED), ("g", "{}")],
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
     None, [("f", "{}")]),
    ("deepseek_v32", '<｜DSML｜invoke name="f">{x {\n', None, [("f", "{x {")]),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{"a": "</｜DSML｜invoke>", "b": {}}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">{}</｜DSML｜invoke><｜DSML｜invoke name="h">{"c": [1</｜DSML｜function_calls> x',
        " x",
        [("f", '{"a": "</｜DSML｜invoke>", "b": {}}'), ("g", "{}"), ("h", '{"c": [1')],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">12'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">[12]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="g"/>\n</｜DSML｜function_calls>',
        None,
        [("f", '{"a": "12", "b": [12]}'), ("g", "{}")],
    ),
    (
        "gemma4",
        'Ok <|tool_call>call:f{city:<|"|>Rome "{,}"<|"|>,days:[1,-2.5,<|"|>x<|"|>],deep:{a:true,b:null},e:{},'
        "f:[]}<tool_call|><|tool_call>call:g{}<tool_call|>",
        "Ok",
        [("f", '{"city": "Rome \\"{,}\\"", "days": [1, -2.5, "x"], "deep": {"a": true, "b": null}, "e": {}, '
          '"f": []}'), ("g", "{}")],
    ),
    ("gemma4", '<|tool_call>call:f{<|"|>k<|"|>:plain text,"q": "a\\"\\u00e9", c:"\\x"}<tool_call|>', None,
     [("f", '{"k": "plain text", "q": "a\\"\\u00e9", "c": "\\\\x"}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>cut <|', None, [("f", '{"a": "cut <|')]),
    ("gemma4", "<|tool_call>call:f{a:1]}<tool_call|>.", ".", [("f", '{"a": 1')]),
    ("functiongemma", "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>", None,
     [("f", '{"a": "b"}')]),
    ("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', None,
     [("f", '{"a": 1}')]),
    ("phi4_mini_json", 'Ok functools[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}] .', "Ok  .",
     [("f", '{"a": [1]}'), ("g", "{}")]),
    ("phi4_mini_json", "import functools[5] or functools", "import functools[5] or functools", []),
    ("internlm", 'Ok <|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>', "Ok",
     [("f", '{"a": 1}')]),
    ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {}}\n<function_call> {"name": "g", "arguments": {}}',
     None, [("f", "{}"), ("g", "{}")]),
    ("gigachat3", 'Ok<|function_call|>{"name": "f", "arguments": {"a": 1}}', "Ok", [("f", '{"a": 1}')]),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "f", "arguments": {}}', None, [("f", "{}")]),
    ("xlam", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', None, [("f", "{}"), ("g", "{}")]),
    ("xlam", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', None, [("f", "{}")]),
    ("olmo3", "Ok <function_calls>f(a='x', b=null, c=True)\ng()\n</function_calls>", "Ok",
     [("f", '{"a": "x", "b": null, "c": true}'), ("g", "{}")]),
    (
        "step3",
        'Ok <｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="f"><steptml:parameter name="a">x\ny'
        '</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="g">'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "Ok",
        [("f", '{"a": "x\\ny"}'), ("g", "{}")],
    ),
    (
        "hy_v3",
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
        "<tool_call>g<tool_sep></tool_call>\n</tool_calls>",
        None,
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    (
        "hy_v4",
        "<tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call><tool_call>g</tool_call></tool_calls>",
        None,
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    (
        "apertus",
        'I see.\n<|tools_prefix|>[{"f": ' + NESTED + '}, {"name": {}}]<|tools_suffix|>',
        "I see.",
        [("f", NESTED), ("name", "{}")],
    ),
    ("apertus", '<|tools_prefix|>[{"f": {"a": "b', None, [("f", '{"a": "b')]),
    ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>", "<|tools_prefix|>[{}]<|tools_suffix|>", []),
    (
        "cohere_command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "dots",
        'a <dots_function_call>\n<invoke name="write">\n<parameter name="path">x y</parameter>\n'
        '<parameter name="lines">3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</dots_function_call>',
        "a",
        [("write", '{"path": "x y", "lines": 3}'), ("g", "{}")],
    ),
    (
        "dots",
        '<dots_function_call>{"name": "f", "arguments": {"a": 1}}</dots_function_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    (
        "inkling",
        'Hm.<|content_invoke_tool_json|>{"name":"f","args":{"a":[1]}}<|end_message|>'
        '<|content_invoke_tool_json|>{"name":"g"}<|end_message|>',
        "Hm.",
        [("f", '{"a":[1]}'), ("g", "{}")],
    ),
    (
        "iquest_q1",
        "<iquest_tool_call>f\n<arg_key>a</arg_key><arg_value>x</arg_value></iquest_tool_call>",
        None,
        [("f", '{"a": "x"}')],
    ),
    (
        "minicpm5",
        'a\n<function name="write"><param name="path"><![CDATA[ <b>\n]]></param><param name="lines">3</param></function>\n'
        '<function name="g"></function>',
        "a",
        [("write", '{"path": " <b>\\n", "lines": 3}'), ("g", "{}")],
    ),
    (
        "minicpm5",
        '<function name="write"><param name="path"><![CDATA[a',
        None,
        [("write", '{"path": "a')],
    ),
    (
        "muse",
        '<atem:function_calls>\n<atem:invoke name="api.write">\n<atem:parameter name="a">{"b": [1]}</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        None,
        [("api.write", '{"a": {"b": [1]}}')],
    ),
    ("plamo3", "Before. " + PLAMO % ("f", '{"a": 1}') + " after", "Before.  after", [("f", '{"a": 1}')]),
    (
        "deepseek_v41",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">1</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        None,
        [("f", '{"a": "1"}')],
    ),
    (
        "gigachat35",
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="f">\n<｜GCML｜parameter name="a" string="false">1</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
        None,
        [("f", '{"a": 1}')],
    ),
    ("openai", 'Hi.<|channel|>commentary to=functions.f.g<|message|>{}<|call|>', "Hi.", [("f.g", "{}")]),
]  # fmt: skip
