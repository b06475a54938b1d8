"""Who may connect: HTTP bounds, host names, API keys, and a fair share of places for each key."""
