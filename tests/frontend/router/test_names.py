"""The model that a request names."""

from __future__ import annotations

import pytest
from engine.frontend.router.names import find_name

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nspeech\r\n--x--\r\n'
)
DISPOSITION = b'\r\nContent-Disposition: form-data; name="model"'


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", b'{"messages": [{"model": "no"}], "model": "a"}', "a"),
        ("/api/show", b'{"name": "a:latest"}', "a:latest"),
        ("/v1/completions", b'{"model": 5}', ""),
        ("/v1/completions", b'{"model": ', ""),
        ("/v1beta/models/org/a:generateContent", b"{}", "org/a"),
        ("/openai/deployments/a/chat/completions", b'{"model": "b"}', "a"),
        ("/v1/responses/resp_1?model=a", b"", "a"),
        ("/v1/realtime?deployment=a", b"", "a"),
        ("/v1/files", b"", ""),
        ("/v1/audio/transcriptions", FORM, "speech"),
        ("/v1/audio/transcriptions", b"--x" + DISPOSITION * 40_000, ""),
    ],
)
@pytest.mark.timeout(30)
def test_path_query_and_body_name_the_model(path: str, body: bytes, name: str) -> None:
    route, _, query = path.partition("?")
    is_form = body.startswith(b"--x")
    kind = b"multipart/form-data; boundary=x" if is_form else b"application/json"
    scope = {
        "type": "http",
        "path": route,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"content-type", kind)],
    }
    assert find_name(scope, body) == name
