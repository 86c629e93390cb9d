"""Texts with calls that deviate from the format of their model, and the content and the calls that are found."""

from __future__ import annotations

CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    # Whitespace around calls within content
    (
        "hermes",
        'One: \n<tool_call>{"name": "f"}</tool_call> Two: \n <tool_call>{"name": "g"}</tool_call> Three.',
        "One: \n Two: \n  Three.",
        [("f", "{}"), ("g", "{}")],
    ),
    # Values without an end tag
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=lines>\n3\n<parameter=mode>\nw\n"
        "</function>\n</tool_call>",
        None,
        [("write", '{"path": "a", "lines": 3, "mode": "w"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=other>\nb\n</parameter>\n</function>\n"
        "</tool_call>",
        None,
        [("write", '{"path": "a\\n<parameter=other>\\nb"}')],
    ),
    # Types that the schema does not have
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="write"><｜DSML｜parameter name="lines" string="true">42'
        "</｜DSML｜parameter>"
        '<｜DSML｜parameter name="deep" string="true">{"a": 1}</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        None,
        [("write", '{"lines": 42, "deep": {"a": 1}}')],
    ),
    # All arguments as one value, and another name of the block
    (
        "deepseek_v4",
        '<｜DSML｜toolcalls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="arguments" string="false">'
        '{"path": "a"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜toolcalls>',
        None,
        [("write", '{"path": "a"}')],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="input" string="true">'
        "text</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        None,
        [("write", '{"input": "text"}')],
    ),
    # Text before the name
    (
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="write"><steptml:parameter name="path">a < 5</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        None,
        [("write", '{"path": "a < 5"}')],
    ),
    ("gemma4", '<|tool_call>:f{a:<|"|>x<|"|>}<tool_call|>', None, [("f", '{"a": "x"}')]),
    # Python that is invalid
    (
        "lfm2",
        "<|tool_call_start|>[f(x='a\nb\\'c')]<|tool_call_end|>",
        None,
        [("f", '{"x": "a\\nb\'c"}')],
    ),
    (
        "pythonic",
        "[f(x=007, y=0, z=-05, s='007', t=0.05), g(x={2, 1}, y=true)]",
        None,
        [
            ("f", '{"x": 7, "y": 0, "z": -5, "s": "007", "t": 0.05}'),
            ("g", '{"x": [2, 1], "y": true}'),
        ],
    ),
    # Calls without markers within a text
    (
        "llama3_json",
        'Results: {"name": "write", "parameters": {"path": "a"}}; {"name": "g", "parameters": {}} Anything else?',
        "Results:  Anything else?",
        [("write", '{"path": "a"}'), ("g", "{}")],
    ),
    ("llama3_json", 'Use {"name": "write"} here', 'Use {"name": "write"} here', []),
    (
        "xlam",
        'Here:\n```json\n[{"name": "f", "arguments": {"a": 1}}]\n```\n',
        "Here:",
        [("f", '{"a": 1}')],
    ),
]
