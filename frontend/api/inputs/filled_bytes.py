"""The size of the content that replaces references in a body."""

from __future__ import annotations

from ...http.errors import bad_request
from ..bodies.request_memory import MemoryLease
from ..serving import Serving


class FilledBytes:
    """Counts the bytes that are filled into a body, and limits them to those of a body.

    Attributes:
        total: The bytes so far.
    """

    def __init__(self, serving: Serving, lease: MemoryLease, what: str) -> None:
        """Store where to count the bytes, and the name of the content in errors."""
        self._limit = serving.config.frontend.max_body_bytes
        self._lease = lease
        self._what = what
        self.total = 0

    def add(self, num_bytes: int, where: str) -> None:
        """Count the content in the field `where`.

        Raises:
            APIError: The content is too large in total (400), or there is no room (503).
        """
        self.total += num_bytes
        if self.total > self._limit:
            raise bad_request(
                where,
                f"makes the {self._what} {self.total} bytes, but at most {self._limit} are allowed (--max-body-bytes)",
            )
        self._lease.count_media(num_bytes)
