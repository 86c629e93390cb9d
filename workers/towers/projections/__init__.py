"""The projections of vision towers, and other parts that merge the features of neighboring patches."""
