"""OpenAI's Batches API: files of requests that are answered when interactive requests leave free capacity."""
