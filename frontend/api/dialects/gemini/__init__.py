"""Google's Gemini API: chats, embeddings, token counts and models."""
