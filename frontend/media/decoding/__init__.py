"""Decode images, videos and audio in disposable processes, because files from clients may crash a decoder."""
