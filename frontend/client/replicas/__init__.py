"""The replicas of the engine core as a frontend sees them: connections, load, and which one gets a request."""
