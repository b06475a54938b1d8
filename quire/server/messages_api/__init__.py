"""/v1/messages: Anthropic's API, as a face of conversations."""
