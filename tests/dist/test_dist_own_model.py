"""The model file of docs/guide/own-model.md trains in every layout, and what can't be trained is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cells import SMALL_BUCKETS, advance, job_tree, open_cell, the_same_on_all, world_of

from rayformer.cell.model import load_model
from rayformer.cell.state import load_checkpoint, save_checkpoint, state_hash
from rayformer.ckpt.manifest import step_folder
from rayformer.config.load import job_from_tree
from rayformer.config.strict_yaml import parse
from rayformer.errors import ConfigError

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "own-model.md"


def code(language):
    """The one block of the guide in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with both files of the guide."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "parallel.py").write_text(code("python"))
    (folder / "own.yaml").write_text(code("yaml"))
    return folder


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Whatever is added to the path here is taken off again."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_guide_shows_a_whole_model_in_sixty_lines():
    assert len(code("python").splitlines()) <= 60


def own_job(corpus, layout, **options):
    """The guide's job with its model smaller, on the tests' corpus."""
    tree = job_tree(corpus, layout=layout, batch={"virtual_ranks": 2, "micro": 2}, **options)
    guide, _ = parse(code("yaml"))
    return {**tree, "model": {**guide["model"], "hidden": 32}}


def train_own(member, tree, folder, steps, checkpoints=None, done=0):
    """A task: the curve and the state hash at its end; from a checkpoint after ``done`` steps, else to one."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        if done:
            load_checkpoint(cell, Path(checkpoints) / step_folder(done))
        curve = advance(cell, steps, done=done)
        if checkpoints and not done:
            save_checkpoint(cell, Path(checkpoints), step=steps, consumed_samples=8 * steps)
        return curve, state_hash(cell)


@pytest.fixture(scope="module")
def run_own(run_cells, corpus, folder):
    """``run_own(layout, steps, ...)``: what `train_own` gives, the same on all cells."""

    def run(layout, steps, *arguments, **options):
        tree = own_job(corpus, layout, **options)
        return the_same_on_all(run_cells(world_of(tree), train_own, tree, str(folder), steps, *arguments))

    return run


def numbers(curve):
    return [number for pair in curve for number in pair]


@pytest.fixture(scope="module")
def alone(run_own):
    return run_own({}, 6)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_its_bits_do_not_depend_on_dp_and_pp(run_own, alone, layout):
    assert run_own(layout, 6) == alone
    (first, _), *_, (last, _) = alone[0]
    assert last < first - 0.02


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_tensor_parallelism_gives_its_curve_to_rounding(run_own, alone, layout):
    curve, _ = run_own(layout, 6)
    assert numbers(curve) == pytest.approx(numbers(alone[0]), rel=1e-5)


def test_it_trains_in_bf16_with_the_same_bits_over_dp_and_pp(run_own, alone):
    precision = {"params": "bf16"}
    curve, _ = found = run_own({}, 3, precision=precision)
    assert found == run_own({"dp": 2, "pp": 2}, 3, precision=precision)
    assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in alone[0][:3]], rel=1e-3)


@pytest.mark.parametrize(
    ("written", "read"), [({"dp": 2}, {"pp": 2}), ({"pp": 2}, {"tp": 2}), ({"tp": 2}, {"dp": 2})], ids=str
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(run_own, alone, tmp_path, written, read):
    first, _ = run_own(written, 3, str(tmp_path))
    second, final = run_own(read, 3, str(tmp_path), 3)
    assert numbers(first + second) == pytest.approx(numbers(alone[0]), rel=1e-5)
    if "tp" not in {**written, **read}:
        assert (first + second, final) == alone


def module_text(build):
    """A module whose factory's body is ``build``, beside that of the guide."""
    return f"""
from functools import partial
import torch
from torch import nn
import parallel
from parallel import Block, Layer, FeedForward


class With(nn.Module):
    '''A layer of the guide with one more module behind it.'''

    def __init__(self, section, name, more, ctx):
        super().__init__()
        self.layer = Layer(section, name, None, ctx)
        self.more = more(ctx)

    def forward(self, x):
        return x + self.more(self.layer(x))


def layers_with(section, more):
    (first, *_, last), loss = parallel.build(section)
    names = [f"layers.{{i}}" for i in range(section.depth)]
    return [first, *(Block(name=n, kind="layer", build=partial(With, section, n, more)) for n in names), last], loss


def build(section):
    blocks, loss = parallel.build(section)
    {build}
"""


def refusal(call):
    with pytest.raises(ConfigError) as refused:
        call()
    (problem,) = refused.value.problems
    return str(problem)


def section(factory):
    return SimpleNamespace(factory=factory, hidden=32, vocab=257, heads=4, depth=2)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        ("pass", "it returned NoneType, not a pair of blocks and a loss; return (blocks, loss)"),
        ("return blocks", "it returned list, not a pair"),
        ("return blocks, None", "it returned tuple, not a pair"),
        ("return None, loss", "it returned tuple, not a pair"),
        ("return [nn.Linear(2, 2), *blocks], loss", "one of its blocks is a Linear"),
        ("return blocks[1:], loss", "its blocks are of the kinds layer, layer, output; use one input"),
        ("return [*blocks, blocks[-1]], loss", "kinds input, layer, layer, output, output"),
        ("return [blocks[0], blocks[-1]], loss", "kinds input, output"),
        ("return [], loss", "use one input, then layers, then one output"),
        ("return [*blocks[:2], *blocks[1:]], loss", "two of its blocks are named 'layers.0'; give each block a name"),
    ],
)
def test_a_factory_that_returns_something_else_is_refused(folder, build, told):
    name = f"returns_{abs(hash(build))}"
    (folder / f"{name}.py").write_text(module_text(build))
    message = refusal(lambda: load_model(section(f"{name}:build"), folder))
    assert message.startswith(f"model.factory={name}:build: ") and told in message


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("nowhere:build", "nowhere can't be imported: No module named 'nowhere'; put it on PYTHONPATH or into "),
        ("parallel:made", "parallel.py has no function 'made'; write it like package.module:function"),
        ("broken:build", "broken can't be imported: No module named 'missing_dependency'"),
        ("package:build", "package has no function 'build'"),
    ],
)
def test_a_factory_that_is_not_there_is_refused(folder, factory, told):
    (folder / "broken.py").write_text("import missing_dependency\n")
    (folder / "package").mkdir(exist_ok=True)
    message = refusal(lambda: load_model(section(factory), folder))
    assert message.startswith(f"model.factory={factory}: ") and told in message
    if factory == "nowhere:build":
        assert message.endswith(str(folder))


@pytest.mark.parametrize("factory", ["parallel", "parallel.build", "a b:build", "parallel:", ":build", 3])
def test_a_factory_that_is_not_named_like_one_is_refused(corpus, factory):
    tree = own_job(corpus, {})
    assert "model.factory=" in refusal(lambda: job_from_tree({**tree, "model": {**tree["model"], "factory": factory}}))


def refused_cell(member, tree, folder):
    """A task: the one problem with which this cell is refused."""
    if folder not in sys.path:
        sys.path.insert(0, folder)

    def attempt():
        with open_cell(member, tree) as cell:
            advance(cell, 1)

    return refusal(attempt)


@pytest.mark.parametrize(
    ("more", "layout", "told"),
    [
        ("nn.Dropout(0.1)", {}, "layers.0.more is a Dropout, which draws from a generator"),
        ("nn.Dropout1d(0.1)", {}, "layers.0.more is a Dropout1d"),
        ("nn.BatchNorm1d(16)", {}, "layers.0.more is a BatchNorm1d, which keeps statistics of the samples"),
        ("nn.Linear(32, 32)", {"tp": 2, "sequence_parallel": True}, "is a plain torch parameter"),
        (
            "FeedForward(32, 64, activation='gelu', name='layers.0.mlp', ctx=ctx, out_std=0.02)",
            {},
            "layers.0.mlp.up.weight is the name of two parameters",
        ),
        (
            "FeedForward(32, 64, activation='gelu', name='more', ctx=ctx, out_std=0.02)",
            {"pp": 2},
            "more.up.weight is the name of two parameters; start the names of a block's layers with the block's",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_modules_that_would_make_the_layout_matter_are_refused(run_cells, corpus, folder, more, layout, told):
    name = f"refused_{abs(hash(more))}"
    (folder / f"{name}.py").write_text(module_text(f"return layers_with(section, lambda ctx: {more})"))
    tree = own_job(corpus, layout)
    tree["model"] |= {"factory": f"{name}:build", "depth": 2}
    assert told in the_same_on_all(run_cells(world_of(tree), refused_cell, tree, str(folder)))


@pytest.mark.parametrize(
    "more", ["nn.Dropout(0.0)", "nn.BatchNorm1d(16, track_running_stats=False)", "nn.Linear(32, 32)"]
)
def test_modules_that_do_not_are_taken(run_cells, corpus, folder, more):
    name = f"taken_{abs(hash(more))}"
    (folder / f"{name}.py").write_text(module_text(f"return layers_with(section, lambda ctx: {more})"))
    found = []
    for layout in ({}, {"dp": 2, "pp": 2}, {"tp": 2}):
        tree = own_job(corpus, layout)
        tree["model"] |= {"factory": f"{name}:build", "depth": 2}
        found.append(the_same_on_all(run_cells(world_of(tree), train_own, tree, str(folder), 2)))
    assert found[0] == found[1]
    assert numbers(found[2][0]) == pytest.approx(numbers(found[0][0]), rel=1e-5)


def plain_parameters(member, tree, folder):
    """A task: what this cell's plain modules were made with."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with open_cell(member, tree) as cell:
        return {name: p.detach().numpy().copy() for name, p in cell.stages[0].named_parameters() if ".more." in name}


def test_what_plain_modules_draw_is_keyed_by_seed_and_block(run_cells, corpus, folder):
    (folder / "drawn.py").write_text(module_text("return layers_with(section, lambda ctx: nn.Linear(32, 32))"))

    def drawn(seed):
        tree = own_job(corpus, {}, run={"seed": seed})
        tree["model"] |= {"factory": "drawn:build", "depth": 2}
        weights = [value for value in run_cells(1, plain_parameters, tree, str(folder))[0].values() if value.ndim > 1]
        return [tuple(value[0, :4].tolist()) for value in weights]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 4


def run_command(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(GUIDE.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rayformer.cell", "own.yaml", "--set", "run.steps=2", "--set", "batch.seq=16"]
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


ONE_CELL = ("--set", "layout.pp=1", "--set", "layout.dp=1")


def test_it_trains_from_the_command_line_in_its_folder(folder, corpus):
    done = run_command(folder, *ONE_CELL, "--set", f"data.train=[{{path: {corpus}}}]")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout and "finished: 2 of 2 steps" in done.stdout
    assert (folder / "runs" / "own" / "checkpoints" / step_folder(2) / "manifest.json").is_file()


def test_a_bad_factory_is_told_before_anything_starts(folder, corpus, tmp_path):
    for file in ("own.yaml", "parallel.py"):
        (tmp_path / file).write_text((folder / file).read_text())
    bad = (
        "--set",
        "model.factory=parallel:made",
        "--set",
        "layout.stages=EtL|ttt",
        "--set",
        f"data.train=[{{path: {corpus}}}]",
    )
    done = run_command(tmp_path, *bad)
    assert done.returncode == 2
    assert f"error: model.factory=parallel:made: {tmp_path}/parallel.py has no function 'made'" in done.stderr
    assert not (tmp_path / "runs").exists()
