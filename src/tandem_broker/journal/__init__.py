"""The queue's journal on disk: what was accepted survives a kill and a power cut."""
