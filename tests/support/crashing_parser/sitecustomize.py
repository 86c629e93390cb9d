"""Python imports this at its start where the directory is on PYTHONPATH: some bodies end their frontend."""

import os

from engine.frontend.api.bodies.body import BodyDecoder


def decode(decoder, body, decode=BodyDecoder.decode):
    if b"crash the parser" in body:
        os.abort()
    return decode(decoder, body)


BodyDecoder.decode = decode
