"""The state of requests, slots and steps on which the scheduler works."""
