"""A core relays a call of a frontend to the others, and returns one result."""

from __future__ import annotations

from typing import Any, cast

import pytest
from engine.core.reporting.relayed_calls import RelayedCalls
from engine.protocol.messages import CallResult, EndReasoning


class Sent(list[tuple[bytes, Any]]):
    """The messages that a core has sent."""

    def send(self, identity: bytes, message: Any) -> None:
        self.append((identity, message))


HELD, ENDED = (True, ""), (False, "has ended")
ELSEWHERE = (False, "")


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({}, ELSEWHERE),
        ({1: HELD}, HELD),
        ({1: ELSEWHERE, 2: HELD}, HELD),
        ({1: ENDED, 2: HELD}, HELD),
        ({1: ELSEWHERE, 2: ENDED}, ENDED),
        ({1: ELSEWHERE, 2: ELSEWHERE}, ELSEWHERE),
        ({1: ELSEWHERE, 2: None}, ELSEWHERE),
        ({1: None, 2: ENDED}, ENDED),
    ],
)
def test_the_caller_gets_one_result(
    results: dict[int, tuple[bool, str] | None], expected: tuple[bool, str]
) -> None:
    sent = Sent()
    calls = RelayedCalls(cast(Any, sent), {0: b"0"} | {i: str(i).encode() for i in results})
    calls.relay(0, EndReasoning(7, "owner", "chatcmpl-1"))
    relayed = {identity: message for identity, message in sent if identity != b"0"}
    assert set(relayed) == {str(index).encode() for index in results}
    for index, result in results.items():
        if result is None:
            calls.remove_client(index)
            continue
        message = relayed[str(index).encode()]
        assert (message.owner, message.answer_id) == ("owner", "chatcmpl-1")
        # A frontend that repeats its result changes nothing.
        for _ in range(2):
            calls.apply_result(index, CallResult(message.call_id, *result))
    assert [each for each in sent if each[0] == b"0"] == [(b"0", CallResult(7, *expected))]


def test_a_caller_that_has_disconnected_gets_no_result() -> None:
    sent = Sent()
    calls = RelayedCalls(cast(Any, sent), {0: b"0", 1: b"1"})
    calls.relay(0, EndReasoning(7, "owner", "chatcmpl-1"))
    ((_, message),) = sent
    calls.remove_client(0)
    calls.apply_result(1, CallResult(message.call_id, True))
    assert len(sent) == 1
