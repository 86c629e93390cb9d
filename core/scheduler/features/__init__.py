"""Optional features of the scheduler: drafts, grammars, encoder inputs, LoRA, and isolation of suspected requests."""
