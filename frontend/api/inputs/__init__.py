"""Parse inputs that are neither text nor token ids: embeddings, and KV-transfer parameters."""
