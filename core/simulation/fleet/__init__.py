"""The replicas, the router and the clients of a simulated fleet."""
