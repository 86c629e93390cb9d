"""Decoding of images, videos and sounds in disposable processes."""
