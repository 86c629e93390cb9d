import socket
import urllib.parse
from pathlib import Path

import pytest
from engine.frontend.supervisor.listener import Listener
from engine.protocol.config import FrontendConfig
from engine.protocol.errors import ConfigError


def connect(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    socket.create_connection((parts.hostname, parts.port or 0), timeout=5).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_port_0_gives_a_working_url(host: str) -> None:
    with Listener(FrontendConfig(host=host, port=0)) as listener:
        assert f":{listener.port}" in listener.url
        connect(listener.url)
        connect(f"http://127.0.0.1:{listener.port}")


def test_port_in_use_error_names_port_and_remedy() -> None:
    with Listener(FrontendConfig(port=0)) as first:
        config = FrontendConfig(port=first.port)
        with pytest.raises(ConfigError, match=f"port {first.port} is in use.*--port"):
            Listener(config)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "127.0.0.1,::1", "a.sock"])
def test_foreign_host_error_names_host_and_remedy(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host}.*--host 127.0.0.1"):
        Listener(FrontendConfig(host=host, port=0))


def test_unix_socket_is_removed_and_stale_one_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with Listener(FrontendConfig(uds=path)) as listener:
        assert listener.url == f"unix://{path}"
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        client.close()
        with pytest.raises(ConfigError, match=r"in use; choose another with --uds"):
            Listener(FrontendConfig(uds=path))
    assert not Path(path).exists()


def test_closed_listener_keeps_the_path_of_its_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first = Listener(FrontendConfig(uds=path))
    first.close()
    with Listener(FrontendConfig(uds=path)), socket.socket(socket.AF_UNIX) as client:
        first.close()
        client.connect(path)


def test_regular_file_at_unix_socket_path_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    with pytest.raises(ConfigError, match="--uds"):
        Listener(FrontendConfig(uds=str(path)))
    assert path.read_text() == "keep"
