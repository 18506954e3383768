"""What tests and tools hold Tandem against: never imported by what trains."""
