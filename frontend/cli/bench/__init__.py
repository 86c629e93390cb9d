"""The command `engine bench`: measure the throughput and latencies of any server with OpenAI's API."""
