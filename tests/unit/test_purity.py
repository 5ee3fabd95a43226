"""The decision tower imports neither torch nor Ray, and the numerics tower does not import Ray."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
"""


def modules_below(*paths):
    files = [
        f for path in paths for f in (sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path])
    ]
    return [".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files]


def imported_without(blocked, modules):
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked, modules=modules)], capture_output=True, text=True
    )


def pure_paths():
    pure = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    return [
        *pure,
        "rayformer/observe",
        "rayformer/data",
        "rayformer/ckpt",
        "rayformer/cell/plan.py",
        "rayformer/cell/report.py",
        "rayformer/cli",
    ]


def test_every_pure_module_imports_where_torch_and_ray_are_blocked():
    modules = modules_below(*pure_paths())
    assert len(modules) > 50
    done = imported_without(["torch", "ray"], modules)
    assert done.returncode == 0, done.stderr


def test_the_numerics_tower_imports_where_ray_is_blocked():
    modules = modules_below(*(f"rayformer/{name}" for name in ("groups.py", "ops", "nn", "models", "stages", "optim")))
    done = imported_without(["ray"], [*modules, "rayformer.cell.build", "rayformer.cell.loop", "rayformer.cell.state"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["rayformer.cell.build", "rayformer.actors.worker"])
def test_the_block_works(module):
    assert imported_without(["torch", "ray"], [module]).returncode != 0
