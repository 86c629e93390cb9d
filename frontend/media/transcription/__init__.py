"""Transcription: turn audio clips into text with a speech model, with segments, word times and subtitles."""
