"""Engines that work for one another: one computes a prompt, the other goes on with its KV."""
