"""The state of requests and steps that the scheduler works on."""
