"""The configuration of the store process: its file and its limits."""

from typing import Annotated, Final

import msgspec

from .option import option

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""The default maximum size of a store in memory, in bytes."""
DISK_BYTES: Final = 4 * 1024 * 1024 * 1024
"""The default maximum size of a store in a file, in bytes."""


class StoreConfig(msgspec.Struct, frozen=True):
    """The configuration of the store of objects, and of requests that outlive their client or process."""

    path: Annotated[
        str | None,
        option(
            "File in which requests and their tokens survive crashes",
            name="--store",
            metavar="PATH",
            default_text="in memory only",
        ),
    ] = None
    max_bytes: (
        Annotated[
            int,
            option(
                "Maximum size of the store, such as 4GiB",
                name="--store-max-size",
                ge=1024 * 1024,
                default_text="4GiB in a file, 64MiB in memory",
            ),
        ]
        | None
    ) = None
    max_age_s: Annotated[
        float,
        option(
            "Seconds that stored objects and answers are kept",
            name="--store-max-age",
            ge=1,
            default_text="2592000, 30 days",
        ),
    ] = 30 * 86400.0

    resume_grace_s: Annotated[
        float,
        option("Seconds that a request continues after its client disconnects", ge=0, le=86400),
    ] = 0.0

    @property
    def keeps_requests(self) -> bool:
        """True if requests and their tokens are recorded, so that they survive crashes."""
        return self.path is not None or self.resume_grace_s > 0

    @property
    def size_limit(self) -> int:
        """The maximum size in bytes."""
        if self.max_bytes is not None:
            return self.max_bytes
        return MEMORY_BYTES if self.path is None else DISK_BYTES
