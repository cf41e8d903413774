"""Assistants of Gemma 4: models that draft, and attend to keys of the target."""
