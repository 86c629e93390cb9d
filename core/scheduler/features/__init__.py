"""Optional features of the scheduler: drafts, grammars, encoder inputs, isolation of suspects."""
