"""Benchmarks of speculative decoding, and models whose text is known beforehand."""
