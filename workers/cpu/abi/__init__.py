"""What Python and the native library must agree on: structs, enumerations and functions."""
