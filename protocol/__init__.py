"""Messages, configuration and other definitions that frontends, cores, workers and the supervisor share."""

from .imports import bare_msgspec

bare_msgspec.install()
