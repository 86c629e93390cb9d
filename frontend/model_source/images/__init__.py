"""Reads how a checkpoint's images are processed, from the files of transformers' processors."""
