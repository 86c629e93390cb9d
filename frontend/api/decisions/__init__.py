"""OpenAI's Decisions API: probabilities of the answers to questions about an input."""
