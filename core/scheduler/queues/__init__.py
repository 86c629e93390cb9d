"""The order in which waiting requests are admitted, and the limits that let some of them wait."""
