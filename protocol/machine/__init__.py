"""What this machine gives to the processes of an engine."""
