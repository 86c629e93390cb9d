"""`engine top`: what a running server does, live."""
