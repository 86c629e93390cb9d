"""The running answers whose reasoning clients may end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ....protocol.messages import CallResult, EndReasoning

logger = logging.getLogger(__name__)

HAS_ENDED: Final = "the answer has ended its reasoning, or has none"
"""The detail of a result if the answer cannot end its reasoning."""


class ReasoningEnds:
    """Functions that end the reasoning of this frontend's answers, by the owner of an answer and its ID."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], Callable[[], bool]] = {}

    def add_answer(self, owner: str, answer_id: str, end: Callable[[], bool]) -> None:
        """Add a running answer. `end` ends its reasoning, and returns False if it is not in its reasoning."""
        self._ends[owner, answer_id] = end

    def remove_answer(self, owner: str, answer_id: str) -> None:
        """Remove an answer that has ended."""
        self._ends.pop((owner, answer_id), None)

    def end(self, owner: str, answer_id: str) -> tuple[bool, str]:
        """End the reasoning of an answer. Return whether it was in its reasoning, and else why not.

        The reason is "" if this frontend does not hold the answer.
        """
        end = self._ends.get((owner, answer_id))
        if end is None:
            return False, ""
        return (True, "") if end() else (False, HAS_ENDED)

    def answer_call(self, call: EndReasoning) -> CallResult:
        """Carry out the call of another frontend."""
        try:
            return CallResult(call.call_id, *self.end(call.owner, call.answer_id))
        except Exception:
            logger.exception("could not end the reasoning of an answer")
            return CallResult(call.call_id, False, "the reasoning could not be ended")
