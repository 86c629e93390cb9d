"""The KV cache as the scheduler sees it: block allocation, prefix caching, CPU offload, handoff and connectors."""
