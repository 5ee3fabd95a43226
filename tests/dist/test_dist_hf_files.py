"""What is exported is one set of files whatever the layout, and transformers and we compute the same from each."""

import pickle
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import advance, assembled, job_tree, open_cell, the_same_on_all, world_of
from fixed_samples import FixedSamples, own_masters
from hf_models import hf_model, random_weights, to_ours, token_losses
from hf_models import load_weights as put_weights
from transformers import AutoModelForCausalLM

from rayformer.cell.state import load_checkpoint, load_weights, save_checkpoint
from rayformer.cell.step import StepRunner
from rayformer.ckpt.hf.convert import export
from rayformer.ckpt.manifest import read_manifest, step_folder
from rayformer.ckpt.storage import folder_at
from rayformer.errors import CheckpointError

LLAMA = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257, "norm_eps": 3.7e-4}
GPT2 = {
    **LLAMA,
    "kv_heads": None,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "max_positions": 48,
    "bias": True,
    "tie_embeddings": True,
}
LLAMA3 = {"kind": "llama3", "factor": 5.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 64}
FAMILIES = {
    "llama": {**LLAMA, "rope_scaling": LLAMA3},
    "llama, tied": {**LLAMA, "tie_embeddings": True},
    "mistral": {**LLAMA, "head_dim": 12},
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 14},
    "gpt2": GPT2,
}
TRAINED_IN = [{}, {"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}]  # the same bits
LOADED_INTO = [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"pp": 4}]
STEPS = 2


def tree_of(corpus, family, layout=None):
    options = {"batch": {"micro": 2, "virtual_ranks": 2}, "optim": {"lr": 1e-2}}
    return job_tree(corpus, model=FAMILIES[family], layout=layout, **options)


def rows():
    """Three rows of 16 tokens, and one of 48."""
    random = np.random.default_rng(5)
    return [random.integers(0, LLAMA["vocab"], shape) for shape in ((3, 16), (1, 48))]


def train_and_save(member, tree, folder):
    with open_cell(member, tree) as cell:
        advance(cell, STEPS)
        return save_checkpoint(cell, Path(folder), step=STEPS, consumed_samples=8 * STEPS).state_hash


def load_and_save(member, tree, source, folder):
    with open_cell(member, tree) as cell:
        load_checkpoint(cell, Path(source) / step_folder(STEPS))
        return save_checkpoint(cell, Path(folder), step=STEPS, consumed_samples=8 * STEPS).state_hash


def start_from(member, tree, where, tokens, labels):
    """What a cell makes of the weights at ``where``: the loss, its part of the logits unless it is one stage of
    several, and its part of the masters."""
    with open_cell(member, tree) as cell:
        load_weights(cell, where)
        loss = StepRunner(replace(cell, training=FixedSamples(tokens, labels))).begin(1, 0).loss
        return loss, own_logits(cell) if cell.groups.pp.size == 1 else [], own_masters(cell)


def own_logits(cell):
    """The own part of the logits of each of `rows`."""
    with torch.no_grad():
        return [cell.stages[0](torch.from_numpy(ids)).float().numpy() for ids in rows()]


def logits_of(member, tree, folder):
    with open_cell(member, tree) as cell:
        load_checkpoint(cell, Path(folder) / step_folder(STEPS))
        return own_logits(cell)


def exported(folder, target):
    """The files of an export by name."""
    folder = folder_at(folder) / step_folder(STEPS)
    export(folder, read_manifest(folder), folder_at(target), dtype=None)
    return {path.name: path.read_bytes() for path in Path(target).iterdir()}


@pytest.fixture(scope="module")
def saved(run_cells, corpus, tmp_path_factory):
    """``saved(family)``: the folders of checkpoints of the same state that were saved from each layout."""

    @cache
    def save(family):
        root = tmp_path_factory.mktemp("checkpoints")
        folders, hashes = [], []
        for layout in [*TRAINED_IN, *LOADED_INTO]:
            folder, tree = str(root / str(len(folders))), tree_of(corpus, family, layout)
            if layout in TRAINED_IN:
                results = run_cells(world_of(tree), train_and_save, tree, folder)
            else:
                results = run_cells(world_of(tree), load_and_save, tree, folders[0], folder)
            folders.append(folder)
            hashes.append(the_same_on_all(results))
        assert len(set(hashes)) == 1
        return folders

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_exports_the_same_files(saved, family, tmp_path):
    first, *others = [exported(folder, tmp_path / str(i)) for i, folder in enumerate(saved(family))]
    assert first.keys() == {"model.safetensors", "config.json"}
    assert all(other == first for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_our_logits_of_what_we_export(run_cells, corpus, saved, family, tmp_path):  # B99, B101
    exported(saved(family)[-1], tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    section = FAMILIES[family]
    tied, head = section.get("tie_embeddings", False), model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    assert torch.equal(head, embedding) is tied
    with torch.no_grad():
        theirs = [model(input_ids=torch.from_numpy(ids)).logits.numpy() for ids in rows()]
    for layout in ({}, {"tp": 2}):
        results = run_cells(max(1, layout.get("tp", 1)), logits_of, tree_of(corpus, family, layout), saved(family)[0])
        for expected, parts in zip(theirs, zip(*results)):
            assert np.abs(np.concatenate(parts, axis=-1) - expected).max() < 1e-5


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """``theirs(family)``: a folder that transformers saved, our arrays of its weights, and what its model makes of
    samples: the loss, and the logits of `rows`."""

    @cache
    def save(family):
        section = FAMILIES[family]
        model, weights = hf_model(section), random_weights(section)
        put_weights(model, weights)
        folder = tmp_path_factory.mktemp("theirs")
        model.save_pretrained(folder, max_shard_size="50KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        with torch.no_grad():
            tokens, labels = map(torch.from_numpy, samples())
            loss = token_losses(model, tokens, labels).sum() / (labels >= 0).sum()
            logits = [model(input_ids=torch.from_numpy(ids)).logits.numpy() for ids in rows()]
        return folder, to_ours(weights, section), loss.item(), logits

    return save


def samples():
    block = np.random.default_rng(3).integers(0, LLAMA["vocab"], (8, 17))
    return block[:, :-1].copy(), block[:, 1:].copy()


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_gives_the_same_in_ours(run_cells, corpus, theirs, family, layout):
    folder, weights, loss, logits = theirs(family)
    tree = tree_of(corpus, family, layout)
    results = run_cells(world_of(tree), start_from, tree, f"hf:{folder}", *samples())
    assert the_same_on_all([result[0] for result in results]) == pytest.approx(loss, rel=1e-5)
    found = assembled([result[2] for result in results])
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(found[name].view(np.uint32), value.view(np.uint32)), name
    if "pp" not in layout:
        tp = layout.get("tp", 1)
        for expected, parts in zip(logits, zip(*[result[1] for result in results[:tp]])):
            assert np.abs(np.concatenate(parts, axis=-1) - expected).max() < 1e-5


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def load_each(member, tree, folders, how):
    """What a cell says of every folder, which it must refuse."""
    told = []
    with open_cell(member, tree) as cell:
        for folder in folders:
            with pytest.raises(CheckpointError) as error:
                how(cell, folder)
            told.append(str(error.value))
    return told


@pytest.mark.parametrize("how", [load_checkpoint, load_weights])
def test_a_pickle_in_place_of_a_file_never_runs_in_a_cell(run_cells, corpus, saved, how, tmp_path):  # B109
    source = Path(saved("llama")[2]) / step_folder(STEPS)
    marker, planted = tmp_path / "ran", []
    for file in sorted(source.iterdir()):
        folder = tmp_path / f"with {file.name}"
        shutil.copytree(source, folder)
        (folder / file.name).write_bytes(pickle.dumps(Planted(marker)) + b"\0" * file.stat().st_size)
        planted.append(folder / file.name)
    assert len(planted) == 3
    (told,) = run_cells(1, load_each, tree_of(corpus, "llama"), [str(file.parent) for file in planted], how)
    assert all(str(file) in said for file, said in zip(planted, told)), told
    assert not marker.exists()


def load_what_is_not_ours(member, tree, where):
    with open_cell(member, tree) as cell, pytest.raises(CheckpointError) as error:
        load_weights(cell, where)
    return str(error.value)


def test_weights_of_another_model_are_refused_by_a_cell_too(run_cells, corpus, theirs):
    folder = theirs("llama")[0]
    tree = tree_of(corpus, "qwen3")
    (told,) = run_cells(1, load_what_is_not_ours, tree, f"hf:{folder}")
    assert str(folder) in told and "layers." in told
