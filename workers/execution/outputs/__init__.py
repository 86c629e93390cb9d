"""What a step returns besides tokens: pooled vectors, and the log-probabilities of prompts."""
