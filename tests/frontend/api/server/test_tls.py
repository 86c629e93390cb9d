"""HTTPS: the timeout of handshakes, the certificates of clients, and invalid files."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from engine.protocol.supervisor_messages import Stage
from support.processes.waiting import eventually
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def key_and_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "cert.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return key, certificate


@pytest.mark.parametrize(("requirement", "is_refused"), [(None, True), ("optional", False)])
def test_clients_show_certificates(
    key_and_certificate: tuple[Path, Path], requirement: str | None, is_refused: bool
) -> None:
    key, certificate = map(str, key_and_certificate)
    with FrontendProcess(
        ssl_keyfile=key,
        ssl_certfile=certificate,
        ssl_ca_certs=certificate,
        ssl_cert_reqs=requirement,
    ) as frontend:
        url = f"https://127.0.0.1:{frontend.port}/health"
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        with pytest.raises(httpx.TransportError) if is_refused else contextlib.nullcontext():
            assert httpx.get(url, verify=context).status_code == 200
        context.load_cert_chain(certificate, key)
        assert httpx.get(url, verify=context).status_code == 200
        assert frontend.stop() == 0 and "Traceback" not in frontend.log


def test_a_tls_handshake_has_the_timeout_of_a_request(
    key_and_certificate: tuple[Path, Path],
) -> None:
    key, certificate = key_and_certificate
    with FrontendProcess(
        slow_client_s=1.0, ssl_keyfile=str(key), ssl_certfile=str(certificate)
    ) as frontend:
        url = f"https://127.0.0.1:{frontend.port}/health"
        with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as silent:
            assert httpx.get(url, verify=False).status_code == 200
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(100) == b""
        assert frontend.stop() == 0 and "Traceback" not in frontend.log


def test_an_invalid_certificate_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "bogus.pem"
    file.write_text("bogus")
    with FrontendProcess(
        with_core=False, ssl_keyfile=str(file), ssl_certfile=str(file)
    ) as frontend:
        frontend.wait_for_stage(Stage.FAILED)
        assert "--ssl-certfile" in frontend.stages[-1][1] and "bogus.pem" in frontend.stages[-1][1]
        assert frontend.process.wait(20) == 1


def test_changed_certificates_are_used_without_a_restart(
    key_and_certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    common = "openssl req -x509 -newkey rsa:2048 -passout pass:secret -subj"
    command = f"{common} /CN=first -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with FrontendProcess(
        ssl_keyfile=str(key),
        ssl_certfile=str(certificate),
        ssl_keyfile_password="secret",
        ssl_ciphers="ECDHE-RSA-AES256-GCM-SHA384",
        enable_ssl_refresh=True,
    ) as frontend:
        address = "127.0.0.1", frontend.port
        first = ssl.get_server_certificate(address)
        assert first.split() == certificate.read_text().split()
        # All tests share the default context.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(address, timeout=20) as plain,
            context.wrap_socket(plain) as secured,
        ):
            cipher = secured.cipher()
            assert cipher is not None and cipher[0] == "ECDHE-RSA-AES256-GCM-SHA384"
        key.write_text("unreadable")
        assert eventually(lambda: "the new certificate cannot be loaded" in frontend.log)
        assert ssl.get_server_certificate(address) == first
        for old, new in zip(key_and_certificate, (key, certificate), strict=True):
            new.write_bytes(old.read_bytes())
        assert eventually(lambda: "loaded the new certificate" in frontend.log)
        assert ssl.get_server_certificate(address).split() == certificate.read_text().split()
        assert frontend.stop() == 0
