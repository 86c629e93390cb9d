"""Downloads come only from allowed, public hosts, and are bounded."""

import http.server
import ipaddress
import socket
import ssl
import subprocess
import threading

import pytest
from engine.frontend.media.sources import downloads
from engine.frontend.media.sources.downloads import Downloader, is_public
from engine.protocol.errors import ParameterError

pytestmark = pytest.mark.slow

CONTENT = b"an image" * 10_000


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        pages = {"/image.png?size=1": 200, "/loop": 302, "/away": 302, "/there": 301}
        status = pages.get(self.path, 404)
        self.send_response(status)
        if status in (301, 302):
            target = {"/away": "https://elsewhere/x", "/there": "/image.png?size=1"}
            self.send_header("Location", target.get(self.path, self.path))
        body = CONTENT if status == 200 else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Serve pages at https://localhost. Return the port and the client's TLS settings."""
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, ssl.create_default_context(cafile=certificate)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def download(host):
    port, tls = host
    downloader = Downloader(["localhost"], lambda address: address.is_loopback, tls)
    return lambda path: downloader.download(f"https://localhost:{port}{path}", "url")


def test_a_host_is_read_although_its_first_address_does_not_answer(download, monkeypatch):
    resolve = socket.getaddrinfo

    def resolve_to_two(name, port, **kwargs):
        with socket.create_server(("127.0.0.1", 0)) as closed:
            unused = closed.getsockname()[1]
        return resolve("127.0.0.1", unused, **kwargs) + resolve("127.0.0.1", port, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_to_two)
    assert download("/image.png?size=1") == CONTENT


def test_allowed_hosts_and_their_redirects_are_read(download):
    assert download("/image.png?size=1") == CONTENT
    assert download("/there") == CONTENT


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "url cannot be downloaded: the host answered 404"),
        ("/loop", "url redirects more than 3 times"),
        ("/away", 'url has the host "elsewhere", from which this server does not download'),
    ],
)
def test_unusable_download_answers_are_errors(download, path, message):
    with pytest.raises(ParameterError) as caught:
        download(path)
    assert message in str(caught.value)


def test_downloads_are_limited_in_size_and_time(download, monkeypatch):
    monkeypatch.setattr(downloads, "MAX_BYTES", 1000)
    with pytest.raises(ParameterError, match="has more than 1000 bytes"):
        download("/image.png?size=1")
    monkeypatch.setattr(downloads, "TIMEOUT_S", 0.0)
    with pytest.raises(ParameterError, match="cannot be downloaded: it takes more than 0 s"):
        download("/there")


def test_private_addresses_and_other_urls_are_refused(host):
    port, tls = host
    downloader = Downloader(["localhost"], tls=tls)
    for url, message in (
        (f"https://localhost:{port}/image.png", "whose address is not public"),
        (f"https://127.0.0.1:{port}/image.png", 'has the host "127.0.0.1", from which'),
        ("http://localhost/image.png", "must be a data URL or begin with https://"),
        ("https://localhost:no/image.png", "is not a valid URL"),
        ("https://[::1/image.png", "is not a valid URL"),
        ("https:///image.png", "must be a data URL or begin with https://"),
    ):
        with pytest.raises(ParameterError) as caught:
            downloader.download(url, "url")
        assert message in str(caught.value)
    untrusting = Downloader(["localhost"], lambda _: True)
    with pytest.raises(ParameterError, match=r"cannot be downloaded: .*certificate"):
        untrusting.download(f"https://localhost:{port}/image.png", "url")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
        ("::1", False),
        ("fd00::1", False),
        ("fe80::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_only_addresses_of_the_internet_are_public(address, public):
    assert is_public(ipaddress.ip_address(address)) is public
