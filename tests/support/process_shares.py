"""Which tests run in the same process of `scripts/test`."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

FOLDERS_WITH_SERVERS = ("tests/chaos/", "tests/e2e/", "tests/hostile/")


class ProcessShares(LoadScopeScheduling):
    """Files stay whole. Those whose servers have time limits are one share, so that no two of these meet."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "servers" if path.startswith(FOLDERS_WITH_SERVERS) else path
