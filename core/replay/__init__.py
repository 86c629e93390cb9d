"""The event log of a scheduler: recording, dumps, replay and explanations."""
