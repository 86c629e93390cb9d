"""Files in data URLs, as clients write them."""

import base64

import pytest
from engine.frontend.media.sources.data_urls import read_data_url

CONTENT = bytes(range(256))
TEXT = base64.b64encode(CONTENT).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:;charset=utf-8;BASE64,{TEXT[:76]}\r\n{TEXT[76:]}",
        f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
    ],
)
def test_the_content_is_that_of_the_file(url: str) -> None:
    assert read_data_url(url, "url") == CONTENT
