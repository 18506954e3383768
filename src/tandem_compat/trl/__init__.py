"""TRL's ``GRPOConfig`` and ``GRPOTrainer``: a script that was written for them trains here, as ``tandem.trl`` has them.

A field that would change the result and cannot be had is refused as the configuration is made; one that cannot matter
is told; none is silently ignored.
"""
