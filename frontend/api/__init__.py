"""The OpenAI-compatible HTTP API of a frontend, and its translations of Anthropic's and Ollama's APIs."""
