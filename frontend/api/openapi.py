"""Generate the OpenAPI document of the routes, for `GET /openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, get_args

import msgspec

from ... import __version__
from ..http.access import is_open
from ..http.routing import Route
from .route_descriptions import describe_route
from .schema.refused import with_all_fields

F = TypeVar("F", bound=Callable[..., Any])

_REFERENCE: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"


def accepts(schema: type[msgspec.Struct]) -> Callable[[F], F]:
    """Declare the schemas of the JSON bodies that a handler accepts."""

    def declare(handler: F) -> F:
        handler.body_schema = schema  # type: ignore[attr-defined]
        return handler

    return declare


def _body_schemas(route: Route) -> tuple[type[msgspec.Struct], ...]:
    """Return the schemas that a route accepts. A body must match one of them."""
    schema = getattr(route.endpoint, "body_schema", None)
    return () if schema is None else get_args(schema) or (schema,)


def _body_type(route: Route) -> str:
    """Return the content type of the bodies that a route accepts."""
    found: str = getattr(route.endpoint, "body_type", _JSON)
    return found


def _file_schema(route: Route) -> dict[str, Any]:
    """Return the schema of the field with the file in the forms that a route accepts."""
    name = getattr(route.endpoint, "file_field", "file")
    return {
        "type": "object",
        "properties": {name: {"type": "string", "format": "binary"}},
        "required": [name],
    }


def _success(route: Route) -> dict[str, Any]:
    """Return the answer to a request that succeeds. OpenAPI cannot describe the messages of a WebSocket."""
    if getattr(route.endpoint, "is_websocket", False):
        return {"101": {"description": "A WebSocket"}}
    return {"200": {"description": "OK"}}


def describe_routes(routes: Sequence[Route]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document with every route, method, path parameter and body schema."""
    routes = [route for route in routes if route.in_schema]
    schemas = [_body_schemas(route) for route in routes]
    bodies = list(dict.fromkeys(schema for route_schemas in schemas for schema in route_schemas))
    types = [with_all_fields(schema) for schema in bodies]
    references, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    reference_of = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, route_schemas in zip(routes, schemas, strict=True):
        group, summary = describe_route(route.template)
        operation: dict[str, Any] = {
            "tags": [group],
            "summary": summary,
            "responses": _success(route),
        }
        if all(is_open(route.template, method) for method in route.methods or {"GET"}):
            operation["security"] = []
        if names := sorted(route.parameters):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if route_schemas:
            choices = [reference_of[schema] for schema in route_schemas]
            schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
            if _body_type(route) != _JSON:
                # Forms have files in addition to the fields of the schema.
                schema = {"allOf": [schema, _file_schema(route)]}
            content = {_body_type(route): {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        methods = (route.methods or {"GET"}) - {"HEAD"}
        for method in sorted(methods):
            paths.setdefault(route.template, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Engine", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
