"""Timing, shapes, suites and the tuner; results are JSON with provenance. Importing this room touches no GPU."""
