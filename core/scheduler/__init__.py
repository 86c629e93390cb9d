"""The scheduler: a pure state machine that decides what each step computes."""
