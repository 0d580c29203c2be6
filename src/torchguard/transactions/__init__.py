"""A training step that fails leaves the training as it was."""
