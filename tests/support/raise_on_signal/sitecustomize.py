"""Make one signal raise an exception and another damage memory. Imported if the directory is on PYTHONPATH.

So a test can make any process of a server fail wherever it happens to be, with no help from the server.
"""

import signal


def fail(*_: object) -> None:
    raise RuntimeError("a test asked for this failure")


def damage(_signum: int, frame) -> None:
    """Overwrite the table from which a worker without a model takes its tokens."""
    while frame is not None and "runner" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None:
        frame.f_locals["runner"].ordinary_ids[:] = -1


signal.signal(signal.SIGRTMIN, fail)
signal.signal(signal.SIGRTMIN + 1, damage)
