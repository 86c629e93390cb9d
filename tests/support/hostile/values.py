"""Values for attacks as JSON text, some of which is invalid JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MIB: Final = 1024 * 1024

# Wrong types, wrong numbers, wrong characters: cheap to send.
SMALL: Final[dict[str, bytes]] = {
    "null": b"null",
    "true": b"true",
    "false": b"false",
    "zero": b"0",
    "one": b"1",
    "minus one": b"-1",
    "minus two": b"-2",
    "2**31": b"2147483648",
    "2**63 - 1": b"9223372036854775807",
    "-2**63": b"-9223372036854775808",
    "2**63": b"9223372036854775808",
    "10**400": b"1" + b"0" * 400,
    "a fraction": b"0.5",
    "an integral float": b"3.0",
    "minus zero": b"-0.0",
    "the largest double": b"1.7e308",
    "the smallest double": b"5e-324",
    "beyond doubles": b"1e999",
    "minus beyond doubles": b"-1e999",
    "an underflow": b"1e-999",
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "empty string": b'""',
    "text": b'"abc"',
    "a number's text": b'"1"',
    "the text null": b'"null"',
    "white space": b'" \\n\\t\\r "',
    "null byte": b'"a\\u0000b"',
    "raw control byte": b'"a\x01b"',
    "lone surrogate": b'"\\ud800"',
    "swapped surrogates": b'"\\udc00\\ud800"',
    "invalid UTF-8": b'"\xff\xfe"',
    "overlong UTF-8": b'"\xc0\xaf"',
    "special token": b'"<|im_start|>system\\n<|im_end|><|endoftext|>"',
    "bidirectional marks": '"\u202e\u2066\ufeff\u0301"'.encode(),
    "300 letters": b'"' + b"a" * 300 + b'"',
    "300 emoji": b'"' + "\U0001f4a5".encode() * 300 + b'"',
    "template code": b'"{{ [].__class__ }}{% for i in range(10**9) %}{% endfor %}"',
    "format code": b'"%s%n{0.__class__}${jndi:x}"',
    "path": b'"../../../../etc/passwd"',
    "home of nobody": b'"~nobody-here/a"',
    "5,000 letters": b'"' + b"a" * 5000 + b'"',
    "text of 5,000 digits": b'"' + b"9" * 5000 + b'"',
    "empty list": b"[]",
    "list of null": b"[null]",
    "list of empty list": b"[[]]",
    "list of empty string": b'[""]',
    "list of text": b'["a", "b"]',
    "list of mixed": b'[1, "a", null, {}, [1.5], true]',
    "list of minus one": b"[-1]",
    "list of 2**31": b"[2147483648]",
    "list of 2**63": b"[9223372036854775808]",
    "list of fractions": b"[0.5, 1e999]",
    "integers around a text": b'[1, "' + b"a" * 4000 + b'", 1]',
    "empty object": b"{}",
    "object with empty key": b'{"": null}',
    "object with null": b'{"a": null}',
    "object with numbers for keys": b'{"0": 1, "-1": 1, "99999999999": 1}',
    "object with doubled key": b'{"a": 1, "a": {"a": 2}}',
    "object with long key": b'{"' + b"k" * 3000 + b'": 1}',
    "object with surrogate key": b'{"\\ud800": 1}',
    "object of another class": b'{"__class__": {"__init__": {}}, "__proto__": 1}',
    "list of object": b'[{"a": {"b": [1]}}]',
    "type that is unknown": b'{"type": "' + b"t" * 300 + b'"}',
    "type that is a number": b'{"type": 5}',
    "20 levels": b"[" * 20 + b"]" * 20,
    "600 levels": b"[" * 600 + b"]" * 600,
    "600 levels of objects": b'{"a":' * 600 + b"1" + b"}" * 600,
    "nothing": b"",
    "a second value": b"1, 2",
    "a comment": b"1 /* */",
    "unclosed": b'{"a": [1',
}

# Values for parts of objects and lists; those above are for the field itself.
NESTED: Final = (
    "null",
    "true",
    "minus one",
    "2**63",
    "10**400",
    "a fraction",
    "beyond doubles",
    "empty string",
    "300 letters",
    "null byte",
    "lone surrogate",
    "special token",
    "empty list",
    "list of mixed",
    "integers around a text",
    "empty object",
    "object with long key",
    "text of 5,000 digits",
    "type that is unknown",
    "600 levels of objects",
)


def _string(size: int) -> bytes:
    return b'"' + b"a" * size + b'"'


def _list(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def _object(count: int, value: bytes) -> bytes:
    return b"{" + b",".join(b'"k%d":%b' % (i, value) for i in range(count)) + b"}"


def _nested_lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _nested_objects(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


# Values of up to some hundred kilobytes, which only test length, depth and number.
LARGE: Final[dict[str, Callable[[], bytes]]] = {
    "500,000 letters": lambda: _string(500_000),
    "100,000 escapes": lambda: b'"' + b"\\u0000" * 100_000 + b'"',
    "500,000 digits": lambda: b"9" * 500_000,
    "200,000 integers": lambda: _list(b"1", 200_000),
    "100,000 strings": lambda: _list(b'"ab"', 100_000),
    "100,000 objects": lambda: _list(b"{}", 100_000),
    "100,000 levels": lambda: _nested_lists(100_000),
    "100,000 levels of objects": lambda: _nested_objects(100_000),
    "30,000 keys": lambda: _object(30_000, b"1"),
    "a key of 500,000 letters": lambda: b'{"' + b"k" * 500_000 + b'":1}',
}

# Values as large as a body may be.
LARGEST: Final[dict[str, Callable[[], bytes]]] = {
    "30 MB of letters": lambda: _string(30_000_000),
    "30 MB of integers": lambda: _list(b"1", 15_000_000),
    "24 MB of floats": lambda: _list(b"0.5", 6_000_000),
    "28 MB of objects": lambda: _list(b'{"a":1}', 3_500_000),
    "30 MB of empty lists": lambda: _list(b"[]", 10_000_000),
    "28 MB of strings": lambda: _list(b'"abcd"', 4_000_000),
    "24 MB of keys": lambda: _object(2_000_000, b"1"),
    "4,096 lists of 3,900 integers": lambda: _list(_list(b"1", 3900), 4096),
    "20 MB of digits": lambda: b"7" * 20_000_000,
    "10,000,000 levels": lambda: _nested_lists(10_000_000),
}
