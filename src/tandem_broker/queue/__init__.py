"""The queue: groups of environments in, batches for trainers out. No file, no clock, no JSON."""
