"""The actors of a run: the only package that imports Ray."""
