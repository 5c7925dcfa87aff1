"""What the examples share: their command line, and tiny models that learn the format of a task in seconds."""
