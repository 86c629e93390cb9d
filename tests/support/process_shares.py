"""Assignment of tests to the processes of `scripts/test`."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FOLDERS_WITH_SERVERS = ("tests/chaos/", "tests/e2e/", "tests/hostile/")


class ProcessShares(LoadScopeScheduling):
    """Keeps files whole, and runs all files with servers in one process.

    Servers have time limits, so no two of these files may run at the same time.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "servers" if path.startswith(FOLDERS_WITH_SERVERS) else path
