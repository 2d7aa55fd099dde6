"""Writes samples.json: the samples of megatron-core's GPTDataset and BlendedDataset.

Their inputs are the files f0, f1 and f2 of the tests. Run in an environment with megatron-core. The
file has the versions that were used:

    python samples.py > samples.json

Token number i of a file has the value i, so a sample shows the positions of its tokens. It is
written as a list of [first, count], with padding as [-1, count].
"""

import json
import os
import struct
import sys
import tempfile
from collections import OrderedDict
from types import SimpleNamespace

import megatron.core
import numpy
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


def write_file(f, documents):
    lengths = [0 if d % 7 == 3 else 7919 * (d + 1) * (f + 3) % 997 // 4 for d in range(documents)]
    starts = [2 * sum(lengths[:d]) for d in range(documents)]
    with open(f"f{f}.idx", "wb") as out:
        out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        out.write(struct.pack(f"<{documents}i", *lengths))
        out.write(struct.pack(f"<{documents}q", *starts))
        out.write(struct.pack(f"<{documents + 1}q", *range(documents + 1)))
    numpy.arange(sum(lengths), dtype=numpy.uint16).tofile(f"f{f}.bin")


def runs(tokens):
    out = []
    for t in map(int, tokens):
        if out and (t == out[-1][0] == -1 or t >= 0 and t == sum(out[-1])):
            out[-1][1] += 1
        else:
            out.append([t, 1])
    return out


def sample(dataset, k):
    number = 0
    if isinstance(dataset, BlendedDataset):
        number, k = int(dataset.dataset_index[k]), int(dataset.dataset_sample_index[k])
        dataset = dataset.datasets[number]
    tokens, _ = dataset._query_document_sample_shuffle_indices(k)
    return [number] + runs(tokens)


def main():
    tokenizer = SimpleNamespace(
        unique_identifiers=OrderedDict(
            [("class", "_NullTokenizer"), ("tokenizer_path", [None]), ("vocab_size", "50304")]
        ),
        vocab_size=50304,
        pad=-1,
        eod=50303,
    )
    blend = (["f0", "f1", "f2"], [0.5, 0.2, 0.3])
    results = {}
    for name, changes in {
        "A": {},
        "C": {"blend": (blend[0], None)},
        "D": {"add_extra_token_to_sequence": False},
        "E1": {"drop_last_partial_validation_sequence": False, "random_seed": 7},
        "F": {"blend": (["f0"], None)},
    }.items():
        config = dict(
            random_seed=1234,
            sequence_length=64,
            blend=blend,
            split="70,20,10",
            path_to_cache="cache" + name,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        config.update(changes)
        sizes = [60, 10, 5] if name == "C" else [300, 40, 10]
        datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, GPTDatasetConfig(**config)).build()
        results[name] = {s: [sample(d, k) for k in range(len(d))] for s, d in zip(("train", "valid", "test"), datasets)}
    text = json.dumps(
        {
            "versions": {
                "megatron-core": megatron.core.__version__,
                "numpy": numpy.__version__,
                "python": sys.version.split()[0],
            },
            "samples": results,
        },
        separators=(",", ":"),
    )
    print(text.replace('"train"', '\n"train"').replace('"valid"', '\n"valid"').replace('"test"', '\n"test"'))


with tempfile.TemporaryDirectory() as root:
    os.chdir(root)
    for number, count in enumerate([40, 25, 60]):
        write_file(number, count)
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, init_method="file://" + os.path.join(root, "rendezvous")
    )
    main()
    torch.distributed.destroy_process_group()
