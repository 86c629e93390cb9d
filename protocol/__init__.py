"""Messages, configuration and other definitions that frontends, cores, workers and the supervisor share."""
