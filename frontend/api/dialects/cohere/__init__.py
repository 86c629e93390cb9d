"""Cohere's API: chats and embeddings."""
