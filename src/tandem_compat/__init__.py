"""Files and command lines of Axolotl, ms-swift and Atropos, read as recipes; Tandem finds them by entry points.

Its loggers are named beneath ``tandem``, so that a run's log hears them.
"""
