"""OpenAI's Files API: files that clients upload, and the output files of batches."""
