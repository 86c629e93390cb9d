"""The command `engine completion`: print scripts with which shells complete the commands and flags of `engine`."""
