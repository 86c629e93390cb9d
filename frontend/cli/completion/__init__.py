"""`engine completion`: scripts with which shells complete the commands and flags of `engine`."""
