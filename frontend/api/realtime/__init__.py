"""OpenAI's Realtime API, for sessions that transcribe speech."""
