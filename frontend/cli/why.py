"""The command `engine why`: explain what happened to a request of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from ...protocol.errors import ConfigError
from .remote.server import DEFAULT_URL, find_operator_key

TIMEOUT_S: Final = 120.0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine why`."""
    parser = argparse.ArgumentParser(
        prog="engine why",
        description=(
            "Explain what happened to a request: how long it waited, what it waited for, and "
            "where its time went. The server needs --dump-dir."
        ),
    )
    parser.add_argument(
        "id", metavar="ID", help="The x-request-id of the response, or a prefix of it"
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="URL of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key; $ENGINE_ADMIN_API_KEY or $ENGINE_API_KEY if not given",
    )
    parser.add_argument("--json", action="store_true", help="Print the answer as JSON")
    return parser


def why(argv: Sequence[str]) -> int:
    """Print the timeline of a request. Return 0, or 1 if the server does not know the request."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    try:
        api_key = find_operator_key(parsed.api_key)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        url = f"{parsed.url.rstrip('/')}/debug/requests/{quote(parsed.id, safe='')}"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        print(f"engine: error: {_message_of(error)}", file=sys.stderr)
        return 1
    except (OSError, ValueError, ConfigError) as error:
        print(f"engine: error: cannot reach {parsed.url}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer) if parsed.json else "\n".join(answer["timelines"]).rstrip())
    return 0


def _message_of(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response in OpenAI's format."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
