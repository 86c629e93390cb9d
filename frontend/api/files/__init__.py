"""OpenAI's Files: what clients upload, and the output of batches."""
