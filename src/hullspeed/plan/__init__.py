"""Joins arch, hardware, memory, perf and twin into an answer."""
