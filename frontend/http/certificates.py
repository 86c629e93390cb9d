"""Load the certificate of an HTTPS server again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from ...protocol.config import FrontendConfig

logger = logging.getLogger(__name__)

CHECK_S: Final = 2.0
"""Seconds between checks of the files."""


async def refresh_certificates(context: ssl.SSLContext, config: FrontendConfig) -> None:
    """Load changed files into `context` until cancelled. New connections use them; open ones keep the old certificate.

    Files that cannot be loaded, such as a key without its new certificate, are tried again when they change.
    """
    files = [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]
    paths = [Path(file) for file in files if file]
    password = config.ssl_keyfile_password
    loaded = _state(paths)
    while True:
        await asyncio.sleep(CHECK_S)
        found = _state(paths)
        if found == loaded:
            continue
        loaded = found
        try:
            assert config.ssl_certfile is not None
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
            if config.ssl_ca_certs:
                context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the new certificate cannot be loaded, the old one stays: %s", error)
        else:
            logger.info("loaded the new certificate %s", config.ssl_certfile)


def _state(paths: list[Path]) -> list[tuple[int, int, int]]:
    """Return the identity, the size and the time of change of each file; zeros for a missing one."""
    found = []
    for path in paths:
        try:
            stat = path.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return found
