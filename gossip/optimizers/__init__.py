"""The user's torch optimizers, stepped bucket by bucket, and what belongs to them."""
