"""Benchmarks: each script verifies every implementation, then times it against rivals and against the memory floor."""
