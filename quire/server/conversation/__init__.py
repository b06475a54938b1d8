"""A conversation for any API: messages to a prompt, tools and formats to a grammar, text to thoughts and calls."""
