"""`/kv`: a live page of the block pool."""
