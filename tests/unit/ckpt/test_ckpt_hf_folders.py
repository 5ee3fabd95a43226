"""Folders of Hugging Face models in and out: the same bytes, refused where they are damaged, never a pickle."""

import json
import pickle
import shutil
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.append(str(Path(__file__).parent))
from test_ckpt_hf import CONFIGS, SMALL

from rayformer.ckpt.hf.convert import _cast, export, import_weights
from rayformer.ckpt.hf.weights import SIDE_FILES, HFWeights
from rayformer.ckpt.manifest import MANIFEST, read_manifest, step_folder
from rayformer.ckpt.reader import read_boxes
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.writer import commit, write_file
from rayformer.cli.main import main
from rayformer.errors import CheckpointError
from rayformer.shards import Box

FAMILIES = ["llama", "llama, biases", "mistral", "qwen2, tied", "qwen3", "gpt2", "gpt2, untied"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def save(name, folder, dtype=torch.float32, **options):
    """A model of random weights, norms and biases too, as transformers saves it; its tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=dtype) * 0.1)
    model.save_pretrained(folder, **options)
    return tensors_in(folder)


def tensors_in(folder):
    files = sorted(folder.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    assert sum(map(len, tensors)) == len({name for of_file in tensors for name in of_file})
    return {name: value for of_file in tensors for name, value in of_file.items()}


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def run(*arguments):
    assert main(["ckpt", *map(str, arguments)]) == 0


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_give_the_same_bits(name, dtype, tmp_path):  # B99
    theirs = save(name, tmp_path / "theirs", DTYPES[dtype])
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    run("export", tmp_path / "ckpt", tmp_path / "ours")
    same_bits(tensors_in(tmp_path / "ours"), theirs)
    assert config_in(tmp_path / "ours")["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info


def test_files_in_shards_and_their_names_without_a_prefix_are_read(tmp_path):
    theirs = save("gpt2", tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(tmp_path / "theirs" / "config.json", old)
    constants = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(3)}
    save_file(
        {name.removeprefix("transformer."): value for name, value in theirs.items()} | constants,
        old / "model.safetensors",
    )
    for source in ("theirs", "old"):
        run("import", f"hf:{tmp_path / source}", tmp_path / f"{source} ckpt")
        run("export", tmp_path / f"{source} ckpt", tmp_path / f"{source} back")
        same_bits(tensors_in(tmp_path / f"{source} back"), theirs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_index_has_every_tensor_once(dtype, tmp_path):  # B104
    theirs = save("llama", tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    out = tmp_path / "out"
    run("export", tmp_path / "ckpt", out, "--dtype", dtype, "--max-shard-bytes", 40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = tensors_in(out)
    assert index["weight_map"].keys() == tensors.keys() == theirs.keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(out / file)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        of_file = load_file(out / file)
        assert len(of_file) == 1 or sum(value.nbytes for value in of_file.values()) <= 40_000
    same_bits(tensors, {name: value.to(DTYPES[dtype]) for name, value in theirs.items()})
    assert config_in(out)["dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[dtype]


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "gpt2, untied"])
def test_a_tied_model_has_one_tensor_and_an_untied_one_two(name, tmp_path):  # B101
    save(name, tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    run("export", tmp_path / "ckpt", tmp_path / "ours")
    tied = CONFIGS[name].tie_word_embeddings
    assert config_in(tmp_path / "ours")["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in tensors_in(tmp_path / "ours")) is not tied


def test_a_head_beside_a_tied_embedding_must_be_it(tmp_path, capsys):
    tensors = save("llama, tied", tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    run("import", tmp_path, tmp_path / "ckpt")
    save_file(tensors | {"lm_head.weight": embedding + 1e-3}, tmp_path / "model.safetensors")
    capsys.readouterr()
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "other")]) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err


def every_upper_half():
    uppers = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    edges = np.concatenate([uppers | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    special = np.array([65520, 1e-8, np.inf, -np.inf, np.nan, 3.4e38, 1e-45, -0.0], np.float32).view(np.uint32)
    return np.concatenate([edges, random, special]).astype(np.uint32).view(np.float32)


def test_bf16_is_that_of_torch():
    values = every_upper_half()
    found = torch.frombuffer(bytearray(_cast("x", values, "bf16")), dtype=torch.bfloat16)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    is_nan = torch.from_numpy(np.isnan(values))
    assert torch.equal(found[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))
    assert found[is_nan].isnan().all()
    assert torch.equal(found.float().to(torch.bfloat16).view(torch.int16)[~is_nan], found.view(torch.int16)[~is_nan])


def checkpoint_of(folder, values):
    """A checkpoint of a model with ``values`` in its embedding."""
    theirs = save("llama", folder / "theirs")
    theirs["model.embed_tokens.weight"].view(-1)[: len(values)] = torch.tensor(values)
    save_file(theirs, folder / "theirs" / "model.safetensors")
    return import_weights(HFWeights(folder / "theirs"), folder_at(folder / "ckpt"))


def test_large_and_small_values_survive_bf16(tmp_path):  # B104
    checkpoint_of(tmp_path, [65520.0, 1e-8])
    run("export", tmp_path / "ckpt", tmp_path / "out", "--dtype", "bf16")
    found = tensors_in(tmp_path / "out")["model.embed_tokens.weight"].view(-1)[:2]
    assert found.tolist() == torch.tensor([65520.0, 1e-8], dtype=torch.bfloat16).tolist()


def test_what_fp16_can_not_hold_is_refused_by_name(tmp_path, capsys):
    checkpoint_of(tmp_path, [65520.0])
    assert main(["ckpt", "export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "fp16"]) == 1
    assert "model.embed_tokens.weight has values beyond the range of fp16; " in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_files_are_the_same_however_a_checkpoint_is_cut(tmp_path):
    folder, cut = checkpoint_of(tmp_path, []), folder_at(tmp_path / "cut")
    manifest = read_manifest(folder)
    values = []
    for tensor, shape in manifest.shapes().items():
        for box in cut_in_two(shape):
            array = np.empty(box.shape, np.float32)
            read_boxes(folder, manifest, [(tensor, box, array)])
            values.append((tensor, box, array))
    written = write_file(cut / folder.name, "a-0000.safetensors", values, manifest.shapes())
    commit(cut, cut / folder.name, replace(manifest, shards=written.records))
    shutil.copytree(tmp_path / "ckpt" / "hf", tmp_path / "cut" / "hf")
    for name in ("ckpt", "cut"):
        run("export", tmp_path / name, tmp_path / f"{name} out", "--max-shard-bytes", 9999)
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / f"{name} out").iterdir()} for name in ("ckpt", "cut")
    ]
    assert found[0] == found[1] and len(found[0]) > 10


def cut_in_two(shape):
    """Boxes of a third of the rows and of the others."""
    middle, rest = shape[0] // 3, shape[1:]
    zeros = (0,) * len(rest)
    return [Box(lo=(0, *zeros), hi=(middle, *rest)), Box(lo=(middle, *zeros), hi=tuple(shape))]


# What must never run


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def planted(tmp_path):
    """A pickle that makes a file when it is loaded, and a look whether that is there at the end."""
    marker = tmp_path / "ran"
    yield pickle.dumps(Planted(marker))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists()


def refused(capsys, *arguments):
    """The first line that a command that must fail says."""
    capsys.readouterr()
    assert main(["ckpt", *map(str, arguments)]) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("padded", [False, True], ids=["small", "of the same size"])
def test_a_pickle_in_place_of_a_file_of_theirs_never_runs(planted, padded, tmp_path, capsys):  # B109
    save("llama", tmp_path / "theirs", max_shard_size="60KB")
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    read = [name for name in files if name != "generation_config.json"]
    assert len(read) > 3
    for name in read:
        shutil.copytree(tmp_path / "theirs", tmp_path / f"with {name}")
        path = tmp_path / f"with {name}" / name
        path.write_bytes(planted + b"\0" * (path.stat().st_size * padded))
        assert str(path) in refused(capsys, "import", path.parent, tmp_path / "ckpt")
        with pytest.raises(CheckpointError, match=name):
            HFWeights(path.parent)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("padded", [False, True], ids=["small", "of the same size"])
def test_a_pickle_in_place_of_a_file_of_a_checkpoint_never_runs(planted, padded, tmp_path, capsys):  # B109
    save("llama", tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    folder = tmp_path / "ckpt" / step_folder(0)
    files = sorted(path.relative_to(tmp_path / "ckpt") for path in folder.iterdir())
    for name in [*files, Path("hf/config.json")]:
        other = tmp_path / f"with {name.name}"
        shutil.copytree(tmp_path / "ckpt", other)
        path = other / name
        path.write_bytes(planted + b"\0" * (path.stat().st_size * padded))
        assert str(path) in refused(capsys, "export", path.parent.parent, tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if name.parent.name != "hf":
            capsys.readouterr()
            assert main(["ckpt", "verify", str(other)]) == 1
            assert str(path) in capsys.readouterr().err
        if name.name == MANIFEST:
            for command in ("show", "ls"):
                assert str(path) in refused(capsys, command, other)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_alone_are_refused_with_a_sentence(planted, name, tmp_path, capsys):
    save("llama", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / name)
    (tmp_path / "theirs" / name).write_bytes(planted)
    told = refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")
    assert name in told and "its weights are pickles, which are never read; save them as safetensors" in told


def test_a_pickle_beside_the_weights_is_not_looked_at(planted, tmp_path):
    save("llama", tmp_path / "theirs")
    for name in ("pytorch_model.bin", "training_args.bin"):
        (tmp_path / "theirs" / name).write_bytes(planted)
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    run("export", tmp_path / "ckpt", tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("*.bin"))


# Damage


def head(**tensors):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 64


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it has 0 bytes"),
        (b"\0" * 5, "it has 5 bytes"),
        (b"\xff" * 64, "no safetensors file"),
        ((60).to_bytes(8, "little") + b"{" * 60, "no JSON of tensors"),
        ((60).to_bytes(8, "little") + b"[" * 60, "no JSON of tensors"),
        (head(w=3), "no JSON of tensors"),
        (head(w={"dtype": "F32", "shape": [2, 2]}), "no JSON of tensors"),
        (head(w={"dtype": "F32", "shape": [2.5], "data_offsets": [0, 10]}), "no JSON of tensors"),
        (head(w={"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}), "no JSON of tensors"),
        (head(w={"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}), "w has not the bytes of F32 [2]"),
        (head(w={"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}), "before w does"),
        (head(w={"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}), "w has a shape or a place below 0"),
        (head(w={"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}), "w has a shape or a place below 0"),
        (head(w={"dtype": [], "shape": [2], "data_offsets": [0, 8]}), "no JSON of tensors"),
    ],
    ids=str,
)
def test_a_damaged_head_is_told_with_its_file(content, told, tmp_path, capsys):
    save("llama", tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    path.write_bytes(content)
    line = refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")
    assert str(path) in line and told in line


def test_a_file_that_ends_too_early_is_told(tmp_path, capsys):
    save("llama", tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    content = path.read_bytes()
    for length in (7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert str(path) in refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")


def without(tensors, name):
    return {other: value for other, value in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: without(t, "model.norm.weight"), "there is no tensor model.norm.weight, which config.json asks for"),
        (lambda t: t | {"score.weight": torch.ones(2)}, "there is a tensor score.weight, which config.json does not"),
        (lambda t: t | {"model.norm.weight": torch.ones(47)}, "model.norm.weight has shape [47], and config.json asks"),
        (lambda t: t | {"model.norm.weight": torch.ones(48).double()}, "model.norm.weight is of F64"),
        (lambda t: t | {"model.norm.weight": torch.ones(48).int()}, "model.norm.weight is of I32"),
    ],
)
def test_tensors_that_are_not_the_models_are_told(change, told, tmp_path, capsys):
    tensors = save("llama", tmp_path / "theirs")
    save_file(change(tensors), tmp_path / "theirs" / "model.safetensors")
    assert told in refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")


@pytest.mark.parametrize("place", ["../else.safetensors", "/etc/passwd", "..", "sub/model.safetensors", "a\\b", ""])
def test_an_index_may_not_lead_elsewhere(place, tmp_path, capsys):
    save("llama", tmp_path / "theirs", max_shard_size="60KB")
    shutil.copy(next((tmp_path / "theirs").glob("*.safetensors")), tmp_path / "else.safetensors")
    path = tmp_path / "theirs" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = place
    path.write_text(json.dumps(index))
    line = refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")
    assert str(path) in line and "outside of the folder; refuse it" in line


@pytest.mark.parametrize("weight_map", [None, {}, [], {"model.norm.weight": 3}], ids=str)
def test_an_index_without_files_is_told(weight_map, tmp_path, capsys):
    save("llama", tmp_path / "theirs", max_shard_size="60KB")
    path = tmp_path / "theirs" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    assert f"{path}: its weight_map" in refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")


def test_a_tensor_in_two_files_is_told(tmp_path, capsys):
    tensors = save("llama", tmp_path / "theirs", max_shard_size="60KB")
    file = sorted((tmp_path / "theirs").glob("*.safetensors"))[0]
    save_file(load_file(file) | {"model.norm.weight": tensors["model.norm.weight"]}, file)
    assert f"model.norm.weight is in {file.name} and in " in refused(
        capsys, "import", tmp_path / "theirs", tmp_path / "ckpt"
    )


def test_a_folder_without_a_model_is_told(tmp_path, capsys):
    assert f"{tmp_path}: there is no config.json" in refused(capsys, "import", tmp_path, tmp_path / "ckpt")
    save("llama", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    told = refused(capsys, "import", tmp_path / "theirs", tmp_path / "ckpt")
    assert "there is neither model.safetensors nor model.safetensors.index.json" in told


# What is in memory


def peak_of(work):
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_neither_way_has_the_whole_model_in_memory(tmp_path):
    config = LlamaConfig(**{**SMALL, "num_hidden_layers": 40, "hidden_size": 192, "intermediate_size": 512})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="1MB")
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    source, directory = HFWeights(tmp_path / "theirs"), folder_at(tmp_path / "ckpt")
    assert peak_of(lambda: import_weights(source, directory)) < num_bytes / 8
    folder = directory / step_folder(0)
    manifest, target = read_manifest(folder), folder_at(tmp_path / "out")
    assert peak_of(lambda: export(folder, manifest, target, dtype="bf16")) < num_bytes / 8


# What travels along


def test_tokenizer_files_travel_along(tmp_path):
    save("llama", tmp_path / "theirs")
    for name in SIDE_FILES:
        if name not in ("config.json", "generation_config.json"):
            (tmp_path / "theirs" / name).write_bytes(f"{name} \xff".encode("latin-1"))
    run("import", tmp_path / "theirs", tmp_path / "ckpt")
    run("export", tmp_path / "ckpt", tmp_path / "ours")
    for name in set(SIDE_FILES) - {"config.json"}:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("address", ["{}", "file://{}", "hf:{}", "hf:file://{}"])
def test_a_folder_is_a_path_or_an_address(address, tmp_path):
    theirs = save("llama", tmp_path / "theirs")
    run("import", address.format(tmp_path / "theirs"), f"file://{tmp_path}/ckpt")
    run("export", f"file://{tmp_path}/ckpt", f"file://{tmp_path}/out")
    same_bits(tensors_in(tmp_path / "out"), theirs)


def test_export_needs_an_empty_folder_and_a_known_dtype(tmp_path, capsys):
    checkpoint_of(tmp_path, [])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    assert main(["ckpt", "export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 2
    assert f"error: DIR={tmp_path / 'out'}: it is not empty; " in capsys.readouterr().err
    assert main(["ckpt", "export", str(tmp_path / "ckpt"), str(tmp_path / "new"), "--dtype", "fp8"]) == 2
    assert "error: --dtype=fp8: there is no such dtype; use fp32, bf16 or fp16" in capsys.readouterr().err


def test_a_checkpoint_of_a_model_of_ones_own_is_refused(tmp_path, capsys):
    folder = checkpoint_of(tmp_path, [])
    path = tmp_path / "ckpt" / folder.name / MANIFEST
    tree = json.loads(path.read_text())
    tree["job"]["model"] = {"factory": "mine:build", "hidden": 48, "vocab": 131}
    path.write_text(json.dumps(tree))
    assert "mine:build, which transformers has not" in refused(capsys, "export", tmp_path / "ckpt", tmp_path / "out")
