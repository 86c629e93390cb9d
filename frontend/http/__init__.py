"""The HTTP server of a frontend: connections, time limits, access control and error bodies."""

from . import bare_uvicorn

bare_uvicorn.install()
