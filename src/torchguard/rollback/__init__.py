"""An operation that fails leaves its tensors as they were."""
