"""Transcription: turn sounds into text with a speech model, with segments, word times and subtitles."""
