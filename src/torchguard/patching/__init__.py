"""The guards for code that knows nothing of torchguard: install, uninstall, run a script."""
