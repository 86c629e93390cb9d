from __future__ import annotations

import pytest
from engine.frontend.cli.status import status
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow


def test_status_sends_the_api_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ENGINE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with FrontendProcess(api_keys=("secret",)) as frontend:
        once = ["--once", "--url", f"http://127.0.0.1:{frontend.port}"]
        assert status(once) == 1
        assert "--api-key" in capsys.readouterr().err
        assert status([*once, "--api-key", "secret"]) == 0
        monkeypatch.setenv("ENGINE_API_KEY", "secret")
        assert status(once) == 0
        assert capsys.readouterr().out.count("PROCESS") == 2
