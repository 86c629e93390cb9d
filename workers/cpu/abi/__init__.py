"""Python's mirror of the native library's interface: structs, enumerations and functions."""
