"""Puts an engine together from its options: model, device, ranks, KV stores, peers."""
