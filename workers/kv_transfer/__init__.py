"""The worker sides of KV connectors, which move KV-cache blocks to and from disks and other replicas."""
