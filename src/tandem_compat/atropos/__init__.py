"""Atropos: flags of its example trainer, engine and environments; its names for checkpoints and numbers."""
