"""OpenAI's Batches API: files of requests that are answered while interactive requests leave room."""
