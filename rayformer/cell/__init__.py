"""One cell's numerics, built and run; knows nothing of Ray."""
