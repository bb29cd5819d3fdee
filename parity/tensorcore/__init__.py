"""How a GPU's dot rounds: probe, models and head order."""
