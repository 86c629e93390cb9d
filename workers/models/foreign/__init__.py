"""Models of transformers, which compute families that Engine has no spec of."""
