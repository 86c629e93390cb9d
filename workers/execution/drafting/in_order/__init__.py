"""Parts of heads by which a draft of a block depends on those before it."""
