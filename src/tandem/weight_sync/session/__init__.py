"""What a weight-sync session rests on: its states, and how it outlives the death of an engine."""
