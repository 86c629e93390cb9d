"""The scheduler in virtual time: `engine simulate`."""
