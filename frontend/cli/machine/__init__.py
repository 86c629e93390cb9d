"""The commands `engine doctor` and `engine models`: describe this machine and the models on it."""
