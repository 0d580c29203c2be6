"""Varying sizes become a few static ones."""
