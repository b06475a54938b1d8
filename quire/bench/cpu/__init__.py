"""Benchmarks of the engine on a CPU: speed, and accuracy of integer arithmetic."""
