"""bucketed(): static sizes for functions whose inputs vary. Pad to a bucket, run, slice."""
