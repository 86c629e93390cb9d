"""Make some request bodies crash their frontend. Python imports this if the directory is on PYTHONPATH."""

import os

from engine.frontend.api.bodies.body import BodyDecoder


def decode(decoder, body, decode=BodyDecoder.decode):
    if b"crash the parser" in body:
        os.abort()
    return decode(decoder, body)


BodyDecoder.decode = decode
