"""Entry point for ``ray job submit -- python jobs/pretrain.py JOB``: the same as ``rayformer train JOB``."""

import sys

from rayformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
