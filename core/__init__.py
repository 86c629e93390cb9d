"""The core process: scheduler and KV-cache manager of one replica. It never imports torch."""
