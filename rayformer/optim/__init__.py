"""Data parallelism: gradient buffers, the canonical reduction, the sharded optimizer."""
