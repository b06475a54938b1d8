"""The engine in its own process: its loop, the messages it takes and sends, its signs of life."""
