"""Accuracy: tasks of the field, scored through the engine's public API."""
