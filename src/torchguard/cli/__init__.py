"""The commands of ``python -m torchguard``."""
