"""The commands `engine chat` and `engine complete`: talk to a model on the terminal."""
