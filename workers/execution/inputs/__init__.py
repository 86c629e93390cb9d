"""Encoder inputs of requests in a worker: outputs of encoders, and sources that cross attention reads."""
