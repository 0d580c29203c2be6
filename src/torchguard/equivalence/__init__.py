"""Run a function without side effects, and compare two runs of it."""
