"""Make one signal raise an exception and another damage memory. Imported if the directory is on PYTHONPATH.

So a test can make any process of a server fail at any place, without any help from the server.
"""

import os
import signal
import threading

RETRY_S = 0.001


def fail(signum: int, frame) -> None:
    """Raise an exception, in a process with an event loop only while a task or callback of a stream runs.

    An exception in the loop itself, or in the task that runs the server, would end the process.
    """
    running = []
    while frame is not None and not frame.f_code.co_filename.endswith("asyncio/runners.py"):
        running.append(frame.f_code)
        frame = frame.f_back
    if frame is None or (running and not running[-1].co_filename.endswith("api/server.py")):
        raise RuntimeError("a test asked for this failure")
    threading.Timer(RETRY_S, os.kill, (os.getpid(), signum)).start()


def damage(_signum: int, frame) -> None:
    """Overwrite the table from which a worker without a model takes its tokens."""
    while frame is not None and "runner" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None:
        frame.f_locals["runner"].ordinary_ids[:] = -1


signal.signal(signal.SIGRTMIN, fail)
signal.signal(signal.SIGRTMIN + 1, damage)
