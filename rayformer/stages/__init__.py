"""Pipeline parallelism: what each stage does in a step, in which order, and the executor that does it."""
