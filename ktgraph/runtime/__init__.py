"""Running plans: batches, caches, engines."""
