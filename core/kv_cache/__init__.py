"""The KV-cache manager: block allocation, prefix caching, offload, handoff and connectors."""
