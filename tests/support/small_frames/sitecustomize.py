"""Imported at the start where the directory is on PYTHONPATH: no process of a server takes messages beyond 1 MB."""

from engine.protocol import transport

transport.MAX_FRAME_BYTES = 1_000_000
