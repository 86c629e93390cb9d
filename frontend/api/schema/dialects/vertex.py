"""The request body of Google's Vertex AI."""

from __future__ import annotations

from typing import Any

import msgspec


class PredictRequest(msgspec.Struct, kw_only=True):
    """The body of a prediction: requests of other routes, and fields for all of them."""

    instances: list[Any] | None = None
    parameters: dict[str, Any] | None = None
