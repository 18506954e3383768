"""The broker between environments and trainers, and both sides' clients; Tandem finds it by entry points.

Its loggers are named beneath ``tandem``, so that a run's log and its watchdog hear them.
"""
