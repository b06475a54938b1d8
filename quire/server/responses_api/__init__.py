"""/v1/responses: OpenAI's API for agents, as a face of conversations."""
