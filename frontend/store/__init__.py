"""The store: a process that owns a database of objects and requests, and the frontends' client of it."""
