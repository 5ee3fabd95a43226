"""Recompute a checkpoint's state hash without rayformer: ``python recompute_hash.py STEP_FOLDER`` prints both."""

import json
import sys

import numpy as np
import xxhash


def mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


folder = sys.argv[1]
with open(f"{folder}/manifest.json") as file:
    manifest = json.load(file)
total = 0
for name, tensor in manifest["tensors"].items():
    key, shape = np.uint64(xxhash.xxh3_64_intdigest(name.encode())), tensor["shape"]
    index = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    for shard in tensor["shards"]:
        i = index[tuple(map(slice, shard["lo"], shard["hi"]))].ravel()
        with open(f"{folder}/{shard['file']}", "rb") as file:
            file.seek(shard["offset"])
            bits = np.frombuffer(file.read(shard["bytes"]), dtype="<u4").astype(np.uint64)
        total += int(mix(mix(key ^ i) ^ bits).sum(dtype=np.uint64))
print(f"{total % 2**64:016x}", manifest["state_hash"])
