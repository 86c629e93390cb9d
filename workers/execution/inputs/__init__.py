"""Encoder inputs of requests in a worker: encoder outputs, and the sources that cross attention reads."""
