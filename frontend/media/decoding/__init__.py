"""Decode images, videos and sounds in disposable processes, because files from clients may crash a decoder."""
