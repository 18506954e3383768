"""Verbs of the command line: the broker alone, and environments that play for one."""
