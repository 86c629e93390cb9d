"""Images in requests: where they come from, how a model reads them, and their places in the prompt."""
