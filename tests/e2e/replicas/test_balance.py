"""Requests leave a replica whose load stays too high, with their blocks, and clients notice nothing."""

from __future__ import annotations

from support.processes.program import wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, assert_nothing_is_held, default_model

NUM_STREAMS = 10
NUM_COMPARED = 200
"""Tokens of each stream that are compared with those of a stream that nothing disturbed."""


def test_running_requests_move_to_a_replica_that_has_restarted() -> None:
    """All requests run at the first replica while the second one restarts. Then some of them return."""
    limits = ("--max-model-len", "8192", "--max-num-seqs", "16", "-dp", "2")
    direct = ("--kv-transfer-config", '{"kv_connector": "direct"}')
    with Server(default_model(), *limits, *direct) as server:
        body = {"max_tokens": 6000, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = [{"prompt": f"Tale number {i}:", **body} for i in range(NUM_STREAMS)]
        short = [each | {"max_tokens": NUM_COMPARED} for each in bodies]
        expected = [each[0]["text"] for each in Streams(server, short).answers()]
        received = server.metric("engine:kv_transfer_received_bytes_total")
        streams = Streams(server, bodies)
        streams.wait_until_all_run()
        server.child("worker 1").kill()
        wait_until(lambda: running(server) == (NUM_STREAMS, 0), what="all run at the first replica")
        wait_until(lambda: running(server)[1] >= 3, 120, what="some run at the second replica")
        assert server.metric("engine:kv_transfer_received_bytes_total") > received
        streams.wait_for_events(NUM_COMPARED * NUM_STREAMS)
        for stream in streams.streams:
            stream.max_events = 0
        for answer, text in zip(streams.answers(), expected, strict=True):
            assert "error" not in answer and "connection" not in answer
            assert answer[0]["text"][: len(text)] == text[: len(answer[0]["text"])]
        assert server.metric("engine:kv_transfer_failed_loads_total") == 0
        wait_until(lambda: sum(running(server)) == 0)
        assert_nothing_is_held(server)


def running(server: Server) -> tuple[int, int]:
    """Return the number of requests that run at each replica."""
    first, second = (
        int(server.metric("engine:num_requests_running", engine=engine)) for engine in ("0", "1")
    )
    return first, second
