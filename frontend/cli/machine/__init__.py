"""`engine doctor` and `engine models`: this machine, and the models on it."""
