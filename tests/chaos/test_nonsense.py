"""A worker that returns invalid tokens does not change the outputs of streams."""

from __future__ import annotations

from support.processes.faults import ENVIRONMENT, damage
from support.requests.mixed_streams import WITHOUT_LOGPROBS, Streams, bodies
from support.servers.server import Server, assert_nothing_is_held, default_model, wait_until

# Without logits, there are no log-probabilities and no constraints.
CHANGES = {**WITHOUT_LOGPROBS, "structured_outputs": None, "max_tokens": 200}
REQUESTS = [{**body, **CHANGES} for body in bodies(10)]


def test_streams_are_unchanged_by_invalid_outputs_of_a_worker() -> None:
    args = (default_model(), "--device", "null", "--null-step-ms", "5")
    with Server(*args, env=ENVIRONMENT) as server:
        undisturbed = Streams(server, REQUESTS).answers()
        assert [answer for answer in undisturbed if "done" not in answer or "error" in answer] == []
        victim = server.child("worker 0")
        streams = Streams(server, REQUESTS)
        streams.wait_for_events(100)
        damage(victim)
        assert streams.answers() == undisturbed
        assert "out-of-range token or slot ids" in server.log
        wait_until(lambda: not victim.is_running(), what="the worker is replaced")
        assert_nothing_is_held(server)
        assert server.stop() == 0
