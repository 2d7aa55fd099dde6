"""Writes megatron_order.json: the samples of Megatron-LM, for TestMegatronGolden.

    python megatron_order.py > megatron_order.json

The script needs megatron-core and its dependencies. The file has the versions that were used. Three
token files f0, f1, f2 are made by formula. megatron-core builds an index cache of each
configuration, and its datasets return every sample of the train and valid splits. The file has the
MD5s of the index files, and the fingerprints of docs/formats/fingerprints.md: the steps of the
training samples in batches of 8, and the sample hashes of the validation set, by dataset, without
padded samples.
"""

import hashlib
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

BATCH = 8


def write_file(f, documents):
    lengths = [0 if d % 7 == 3 else 7919 * (d + 1) * (f + 3) % 997 // 4 for d in range(documents)]
    starts = [2 * sum(lengths[:d]) for d in range(documents)]
    with open(f"f{f}.idx", "wb") as out:
        out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        out.write(struct.pack(f"<{documents}i", *lengths))
        out.write(struct.pack(f"<{documents}q", *starts))
        out.write(struct.pack(f"<{documents + 1}q", *range(documents + 1)))
    ids = [(7919 * t + 10007 * f + t * t // 3) % 50000 for t in range(sum(lengths))]
    numpy.array(ids, dtype=numpy.uint16).tofile(f"f{f}.bin")


def sample(dataset, k):
    """Returns a sample's tokens, before the division into inputs and labels; None if padded."""
    number = 0
    if isinstance(dataset, BlendedDataset):
        number, k = int(dataset.dataset_index[k]), int(dataset.dataset_sample_index[k])
        dataset = dataset.datasets[number]
    tokens, _ = dataset._query_document_sample_shuffle_indices(k)
    return number, None if -1 in tokens else [int(t) for t in tokens]


def sample_hash(tokens):
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:16]


def steps(dataset):
    log = []
    for first in range(0, len(dataset), BATCH):
        hashes = [sample_hash(sample(dataset, k)[1]) for k in range(first, min(first + BATCH, len(dataset)))]
        total = sum(int.from_bytes(h, "little") for h in hashes) % 2**128
        log.append([hashlib.sha256(b"".join(hashes)).hexdigest(), total.to_bytes(16, "little").hex()])
    return log


def held_out(dataset):
    """Returns the sample hashes by dataset, in the order of the dataset's sample numbers."""
    found = {}
    for k in range(len(dataset)):
        number, tokens = sample(dataset, k)
        if tokens is not None:
            found.setdefault(number, []).append(sample_hash(tokens).hex())
    return found


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
        "blend": {},
        "no extra token": {"add_extra_token_to_sequence": False},
        "partial": {"drop_last_partial_validation_sequence": False, "random_seed": 7},
        "one file": {"blend": (["f0"], None)},
        "twice": {"blend": (["f0", "f2", "f0"], [0.1, 0.7, 0.2])},
    }.items():
        config = dict(
            random_seed=1234,
            sequence_length=64,
            blend=blend,
            split="70,20,10",
            path_to_cache="cache " + name,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        config.update(changes)
        train, valid, _ = BlendedMegatronDatasetBuilder(
            GPTDataset, [300, 40, 10], lambda: True, GPTDatasetConfig(**config)
        ).build()
        md5 = {
            f: hashlib.md5(open(os.path.join("cache " + name, f), "rb").read()).hexdigest()
            for f in sorted(os.listdir("cache " + name))
        }
        results[name] = {
            "md5": md5,
            "samples": len(train),
            "steps": steps(train),
            "valid": held_out(valid),
            "train_hash": train.unique_description_hash,
            "valid_hash": valid.unique_description_hash,
        }
    print(
        json.dumps(
            {
                "versions": {
                    "megatron-core": megatron.core.__version__,
                    "numpy": numpy.__version__,
                    "torch": torch.__version__,
                    "python": sys.version.split()[0],
                },
                "batch": BATCH,
                "configurations": results,
            },
            indent=0,
        )
    )


with tempfile.TemporaryDirectory() as root:
    os.chdir(root)
    for number, count in enumerate([40, 25, 60]):
        write_file(number, count)
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, init_method="file://" + os.path.join(root, "rendezvous")
    )
    main()
    torch.distributed.destroy_process_group()
