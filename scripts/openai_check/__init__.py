"""Checks of the OpenAI-compatible endpoint by clients of others, and by hostile ones."""
