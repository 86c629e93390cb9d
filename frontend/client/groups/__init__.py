"""Groups: the sequences of one request, how they are created, and how their progress is recorded."""
