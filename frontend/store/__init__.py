"""The store: a process that owns the database, and the frontends' client of it."""
