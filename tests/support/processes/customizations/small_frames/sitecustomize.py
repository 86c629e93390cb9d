"""Limit all messages of a server to 1 MB. Python imports this module if the directory is on PYTHONPATH."""

from engine.protocol import transport

transport.MAX_FRAME_BYTES = 1_000_000
