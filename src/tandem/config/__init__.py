"""Reading and writing recipes: YAML with locations, overrides, and dataclasses that declare what may be written."""
