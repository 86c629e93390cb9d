"""The parent of the supervisor, which starts another supervisor if it crashes."""
