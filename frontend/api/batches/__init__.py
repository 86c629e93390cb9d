"""OpenAI's Batches: files of requests that are answered while interactive requests leave room."""
