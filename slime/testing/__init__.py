"""What users test their plug-ins with: contracts of every hook, and an engine that needs no model."""
