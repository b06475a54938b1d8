"""Talks to servers of the OpenAI API: Quire's own or anybody's."""
