"""The job file: strict YAML into frozen models, one file per section, every problem reported at once."""
