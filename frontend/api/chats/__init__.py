"""Chats: prompts, and answers in the format of OpenAI."""
