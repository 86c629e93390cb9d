"""OpenAI's Responses API: a dialect of chats, whose answers are stored and can run in the background."""
