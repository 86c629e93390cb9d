"""Resize images and videos and cut them into tiles, exactly as transformers' processors with Pillow do."""
