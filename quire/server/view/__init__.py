"""The engine's view for the page: frames of the real engine, and scenarios on small ones."""
