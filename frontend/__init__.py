"""The programs that clients and users talk to: HTTP frontends, the supervisor and the command line."""
