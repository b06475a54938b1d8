"""A client for servers of the OpenAI API: Quire's own or others."""
