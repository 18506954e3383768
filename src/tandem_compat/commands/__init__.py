"""Verbs that speak another system's command line."""
