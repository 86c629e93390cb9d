"""`engine chat` and `engine complete`: talk to a model from the terminal."""
