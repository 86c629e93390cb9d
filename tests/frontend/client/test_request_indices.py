"""Numbers of requests."""

from engine.frontend.client.request_indices import MAX_REQUEST_INDEX, RequestIndices


def test_live_requests_have_different_indices():
    live = {0}
    indices = RequestIndices(live, last=MAX_REQUEST_INDEX - 1)
    for _ in range(3):
        live.add(indices.next_free())
    assert live == {0, MAX_REQUEST_INDEX, 1, 2}
