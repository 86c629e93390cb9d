"""Python imports this at its start where the directory is on PYTHONPATH: a signal raises an exception.

So a test can make any process of a server fail wherever it happens to be, with no help from the server.
"""

import signal


def fail(*_: object) -> None:
    raise RuntimeError("a test asked for this failure")


signal.signal(signal.SIGRTMIN, fail)
