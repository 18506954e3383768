"""Atropos' wire protocol: messages, their bytes, and groups as Tandem has them."""
