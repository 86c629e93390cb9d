"""A frontend's view of the replicas: connections to their cores, their load, and the choice of one for each request."""
