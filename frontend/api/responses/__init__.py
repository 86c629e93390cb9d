"""OpenAI's Responses API: a dialect of chats whose answers are stored."""
