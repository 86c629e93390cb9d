"""Execute steps in a worker: the model, its KV cache, and the requests."""
