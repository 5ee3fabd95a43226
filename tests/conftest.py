"""Fixtures of the tests that start jobs: a Ray that stands by itself, a corpus, and commands that end with the test."""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))  # so that tests can import the modules beside it

import pytest
from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def standing_ray():
    """One Ray for the whole test run; it declares two CPUs."""
    from rayjobs import StandingRay

    folder = Path(tempfile.mkdtemp(prefix="rf"))  # short: a socket's path has at most 107 characters
    ray = StandingRay(folder, num_cpus=2)
    yield ray
    ray.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def standing(standing_ray):
    """The standing Ray, on which a test must leave nothing."""
    from rayjobs import until

    yield standing_ray
    until(lambda: not standing_ray.live(), "actors and placement groups to go", deadline_s=30)


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """The prefix of a small corpus."""
    from rayjobs import write_corpus

    return write_corpus(tmp_path_factory.mktemp("documents") / "documents")


@pytest.fixture
def start(tmp_path):
    """``start(module, *arguments)``: a Python module begun as a command; what is left of it ends with the test."""
    from rayjobs import Driver

    drivers = []

    def begin(module, *arguments):
        drivers.append(Driver([sys.executable, "-m", module, *arguments], folder=tmp_path))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.close()


@pytest.fixture
def train(start):
    """``train(job, *arguments)``: ``rayformer train`` begun."""
    return lambda job, *arguments: start("rayformer.cli.main", "train", job, *arguments)
