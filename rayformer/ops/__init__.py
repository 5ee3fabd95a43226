"""Autograd collectives, keyed randomness and kernels: they take groups and tensors, never modules."""
