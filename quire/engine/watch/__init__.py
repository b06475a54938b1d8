"""Frames for those who watch an engine: what its steps and blocks did since the last frame."""
