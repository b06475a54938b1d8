"""The OpenAI API over HTTP: `quire serve`."""
