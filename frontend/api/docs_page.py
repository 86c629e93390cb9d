"""The web page of `GET /docs`: an OpenAPI document as HTML without scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border: 1px solid #8886; border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
code { font-family: ui-monospace, monospace; }
summary code:first-child { display: inline-block; min-width: 3.5rem; font-weight: bold; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { border-top: 1px solid #8886; padding: .2rem .6rem .2rem 0; text-align: left; }
"""

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Response headers. They let the browser apply the page's own style, and load nothing."""


def render_docs(document: Mapping[str, Any]) -> str:
    """Return the web page for an OpenAPI document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    schemas = document["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            section = "".join(_operation(method, path, operation, schemas))
            groups.setdefault(operation["tags"][0], []).append(section)
    body = "".join(
        f"<h2>{escape(group.capitalize())}</h2>{''.join(sections)}"
        for group, sections in groups.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>"
        "<p>The same description for programs: <code>/openapi.json</code>.</p>"
        f"{body}</body></html>"
    )


def type_name(schema: Mapping[str, Any]) -> str:
    """Return a short name of a JSON schema's type, such as `array of string`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_name, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {type_name(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<details><summary><code>{method.upper()}</code> <code>{escape(path)}</code> "
    yield f"{escape(operation['summary'])}</summary>"
    parameters = operation.get("parameters", [])
    if parameters:
        yield _table((p["name"], type_name(p["schema"]), "yes") for p in parameters)
    if (body := operation.get("requestBody")) is not None:
        [(content_type, content)] = body["content"].items()
        whole = content["schema"]
        for choice in whole.get("anyOf", [whole]):
            # Forms have files in addition to the fields of the first schema.
            name = type_name(choice.get("allOf", [choice])[0])
            schema = schemas.get(name, {})
            required = schema.get("required", [])
            kind = (
                "JSON body" if content_type == "application/json" else f"{content_type} with file"
            )
            yield f"<p>{escape(kind)}: <code>{escape(name)}</code></p>"
            yield _table(
                (field, type_name(field_schema), "yes" if field in required else "")
                for field, field_schema in schema.get("properties", {}).items()
            )
    yield "</details>"


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{required}</td></tr>"
        for name, kind, required in rows
    )
    return f"<table><tr><th>field</th><th>type</th><th>required</th></tr>{cells}</table>"
