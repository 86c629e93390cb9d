"""The resources of this machine that processes of an engine may use."""
