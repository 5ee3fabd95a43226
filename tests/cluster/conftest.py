"""The reference of the tests in this folder."""

import sys

import pytest
from rayjobs import Driver, write_job


@pytest.fixture(scope="session")
def one_process(documents, tmp_path_factory):
    """The job that `write_job` gives, run without Ray in one process and without a stop."""
    folder = tmp_path_factory.mktemp("one_process")
    job = write_job(folder, "one", corpus=documents)
    driver = Driver([sys.executable, "-m", "rayformer.cell", job], folder=folder)
    assert driver.finish() == 0, driver.output
    return job
