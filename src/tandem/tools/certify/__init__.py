"""A recipe's objective, proven: its gradient against variations that must not matter, and against plain formulas."""
