"""Transcribes sounds with a speech model: prompts, windows in parallel, segments, word times and subtitles."""
