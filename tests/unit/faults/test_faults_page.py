"""docs/guide/faults.md: every effect, option and place, and as the code has it."""

import runpy
from pathlib import Path

import pytest
import yaml

from rayformer.cell.progress import PHASES
from rayformer.config.faults import FaultConfig
from rayformer.config.keys import keys_of
from rayformer.faults.plan import NAMED_INSTRUCTIONS, PLACES, resolve_faults
from rayformer.layout import Layout

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "guide" / "faults.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    assert runpy.run_path(str(DOCS / "make_faults.py"))["faults_page"]() == PAGE, "run python docs/make_faults.py"


@pytest.mark.parametrize("name", [*keys_of(FaultConfig), *PHASES, *NAMED_INSTRUCTIONS, "any"])
def test_the_page_has(name):
    assert any(f"`{name}`" in line for line in PAGE.splitlines() if line.startswith("| "))


def test_every_phase_is_explained():
    assert tuple(PLACES) == PHASES


def test_the_example_is_a_plan():
    example = yaml.safe_load(PAGE.partition("```yaml\n")[2].partition("```")[0])
    faults = resolve_faults([FaultConfig.model_validate(entry) for entry in example], Layout(pp=2, dp=2))
    assert [fault.effect for fault in faults] == ["kill", "freeze", "kill", "kill_holder"]
