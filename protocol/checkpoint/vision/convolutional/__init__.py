"""The towers that consist of convolutions."""
