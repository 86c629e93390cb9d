"""`engine bench`: measure any server with OpenAI's API."""
