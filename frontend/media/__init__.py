"""Images, videos and audio in requests: load and decode them, preprocess them, and place them in the prompt."""
