"""Models: a list of blocks and a loss, and nothing else."""
