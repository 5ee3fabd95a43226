"""The command line: parse, load the job, call one function."""
