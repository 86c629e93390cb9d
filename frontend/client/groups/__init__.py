"""Groups of sequences: how they are made, and what records them."""
