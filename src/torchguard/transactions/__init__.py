"""A training step that fails is rolled back."""
