"""The workers' halves of KV connectors, which move KV-cache blocks between a worker and elsewhere."""
