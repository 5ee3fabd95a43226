"""The loss in the log is that of the whole global batch, whichever cell tells it."""

import json

import numpy as np
import pytest
import torch
from cells import MODEL, job_tree, the_same_on_all, train_events
from hf_models import hf_model, load_weights, to_hugging_face, token_losses
from safetensors import safe_open

from rayformer.ckpt.manifest import step_folder
from rayformer.data.indexed import IndexedWriter
from rayformer.data.order import sample_at

SAMPLES, SEQ = 8, 16


def weights_of_checkpoint(folder):
    """The whole weights of a checkpoint by our names, read with safetensors alone."""
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    found = {}
    for tensor, entry in tensors.items():
        name, _, kind = tensor.rpartition("@")
        if kind == "master":
            found[name] = np.zeros(entry["shape"], np.float32)
            for shard in entry["shards"]:
                ranges = ",".join(f"{lo}:{hi}" for lo, hi in zip(shard["lo"], shard["hi"]))
                with safe_open(folder / shard["file"], "np") as file:
                    found[name][tuple(map(slice, shard["lo"], shard["hi"]))] = file.get_tensor(f"{tensor}[{ranges}]")
    return found


@pytest.fixture
def different_samples(tmp_path):
    """8 samples: two of one constant token, the others random; the prefix and the tokens."""
    tokens = np.random.default_rng(5).integers(0, 257, SAMPLES * SEQ + 1)
    tokens[: 2 * SEQ] = 7
    with IndexedWriter(tmp_path / "different", "uint16") as writer:
        writer.add_document(tokens)
    return str(tmp_path / "different"), tokens


def test_logged_loss_is_that_of_the_whole_batch(run_cells, different_samples, tmp_path):  # B115
    prefix, stream = different_samples
    tree = job_tree(prefix, layout={"dp": 2, "pp": 2}, optim={"lr": 5e-3}, checkpoint={"every": 10, "keep": 0})
    tree["data"]["split"] = [1.0, 0.0, 0.0]
    run_cells(4, train_events, tree, str(tmp_path), 0, 0)  # the initial checkpoint
    events = run_cells(4, train_events, tree, str(tmp_path), 0, 11)
    logged = the_same_on_all([{e["step"]: e["loss"] for e in cell if "loss" in e} for cell in events])
    for done in (0, 10):
        model = hf_model(MODEL)
        load_weights(model, to_hugging_face(weights_of_checkpoint(tmp_path / step_folder(done)), MODEL))
        first = [sample_at(done * 8 + n, num_samples=SAMPLES, seed=1234) * SEQ for n in range(8)]
        block = torch.from_numpy(np.stack([stream[at : at + SEQ + 1] for at in first]))
        with torch.no_grad():
            by_sample = token_losses(model, block[:, :-1], block[:, 1:]).double().mean(dim=1)
        assert logged[done + 1] == pytest.approx(by_sample.mean().item(), rel=1e-6)
        for part in (by_sample[:4], by_sample[4:], by_sample[-1:], by_sample[:1]):
            assert abs(part.mean() / by_sample.mean() - 1) > (1e-4 if done == 0 else 1e-3)
