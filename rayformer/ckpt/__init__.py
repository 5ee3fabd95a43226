"""Checkpoints: state in model coordinates, a manifest that is written last, and readers that trust nothing else."""
