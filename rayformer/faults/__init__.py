"""Faults on purpose: what a job asks to go wrong, done by decorators of small protocols, and proven."""
