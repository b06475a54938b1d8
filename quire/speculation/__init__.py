"""Speculative decoding: proposers of drafts, how many drafts a step verifies, and which of them the target accepts."""
