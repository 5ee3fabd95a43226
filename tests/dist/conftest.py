"""Fixtures of the tests that need several processes: the pool, a corpus, and the one-process reference."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see StoreClients
sys.path.insert(0, str(Path(__file__).parent))  # so that tests and workers can import the modules beside this file

import pytest
from cells import train_curve, write_corpus
from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pool = WorkerPool(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_cells(pool):
    """``run_cells(world, function, *args)``: what ``function(member, *args)`` returned, by rank."""

    def run(world, function, *args, deadline_s=120.0):
        return pool.run(world, function, args, deadline_s=deadline_s)

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The prefix of a small .bin/.idx corpus."""
    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    write_corpus(prefix)
    return str(prefix)


@pytest.fixture(scope="session")
def reference(run_cells):
    """``reference(tree, steps)``: what `train_curve` gives in one process, each computed once."""
    known = {}

    def run(tree, steps):
        key = json.dumps([tree, steps])
        if key not in known:
            (known[key],) = run_cells(1, train_curve, {**tree, "layout": {}}, steps)
        return known[key]

    return run
