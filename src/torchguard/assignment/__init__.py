"""Indexed assignment that keeps its gradient, eager and compiled."""
