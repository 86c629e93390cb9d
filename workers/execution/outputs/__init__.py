"""The results of a step other than tokens: pooled vectors, and the log-probabilities of prompts."""
