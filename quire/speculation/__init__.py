"""Speculative decoding: who proposes tokens, how many are worth computing, and which of them the target keeps."""
