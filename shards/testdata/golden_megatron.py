"""Golden files for package shards, made by megatron-core and pyarrow.

python golden_megatron.py write DIR
    megatron-core's IndexedDatasetBuilder writes shards to DIR, and its input to DIR/cases.json.
python golden_megatron.py read DIR
    megatron-core's IndexedDataset and pyarrow read mula's shards in DIR. Prints their content as
    JSON.

The files in this folder have the versions of numpy, torch, megatron-core and pyarrow. They were
made with:

    python testdata/golden_megatron.py write testdata/builder
    go test -run TestMegatronReads -megatron /tmp/shards .
    python testdata/golden_megatron.py read /tmp/shards > testdata/seen.json
"""

import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import sys

import numpy
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

VERSIONS = {name: importlib.metadata.version(name) for name in ("megatron-core", "numpy", "torch", "pyarrow")}
VERSIONS["python"] = platform.python_version()

# A case is a list of documents, and a document is a list of sequences. Ids come from numpy's
# generator, so that bytes have all values.
random = numpy.random.default_rng(2)


def ids(limit, *lengths):
    return [[int(x) for x in random.integers(0, limit, n)] for n in lengths]


CASES = {
    "uint16-many": (50280, [ids(50280, n) for n in (7, 0, 1, 64, 0, 0, 33, 2)]),
    "uint16-one": (65499, [[[65498, 0, 1, 32768]]]),
    "int32-many": (100278, [ids(100278, n) for n in (0, 19, 1, 0, 50, 3)]),
    "int32-one": (65500, [ids(65500, 12)]),
    # Several sequences a document, as written by preprocessing with --split-sentences. mula reads
    # such files but does not write them.
    "uint16-sentences": (50280, [ids(50280, 5, 3), [], ids(50280, 0, 4, 0), ids(50280, 9)]),
}


def write(directory):
    os.makedirs(directory, exist_ok=True)
    for name, (vocabulary, documents) in CASES.items():
        prefix = os.path.join(directory, name)
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(vocabulary))
        for document in documents:
            if len(document) == 1:
                builder.add_document(document[0], [len(document[0])])
            else:
                for sequence in document:
                    builder.add_item(torch.tensor(sequence, dtype=torch.int64))
                builder.end_document()
        builder.finalize(prefix + ".idx")
    cases = {name: {"vocabulary": v, "documents": d} for name, (v, d) in CASES.items()}
    with open(os.path.join(directory, "cases.json"), "w") as f:
        json.dump({"versions": VERSIONS, "cases": cases}, f, separators=(",", ":"))
        f.write("\n")


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def read(directory):
    import pyarrow.ipc

    shards = {}
    for idx in sorted(glob.glob(os.path.join(directory, "*.idx"))):
        prefix = idx[: -len(".idx")]
        dataset = IndexedDataset(prefix)
        tokens = hashlib.sha256()
        for i in range(len(dataset)):
            sequence = dataset[i]
            assert len(sequence) == dataset.sequence_lengths[i]
            if len(sequence) > 2:
                assert (dataset.get(i, offset=1, length=len(sequence) - 2) == sequence[1:-1]).all()
            tokens.update(sequence.astype("<u4").tobytes())
        with pyarrow.ipc.open_file(prefix + ".docs.arrow") as file:
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
            schema = [[field.name, str(field.type)] for field in file.schema]
        origins, edges = hashlib.sha256(), []
        for batch in batches:
            batch.validate(full=True)
            rows = batch.to_pylist()
            edges += [list(rows[0].values()), list(rows[-1].values())]
            for row in rows:
                origins.update(f"{row['id']}\n{row['file']}\n{row['line']}\n".encode())
        shards[os.path.basename(prefix)] = {
            "files": {ext: sha256(prefix + "." + ext) for ext in ("bin", "idx", "docs.arrow")},
            "dtype": dataset.index.dtype.__name__,
            "sequences": len(dataset),
            "first_lengths": dataset.sequence_lengths[:20].tolist(),
            "first_documents": dataset.document_indices[:20].tolist(),
            "lengths_sha256": hashlib.sha256(dataset.sequence_lengths.astype("<i4").tobytes()).hexdigest(),
            "documents_sha256": hashlib.sha256(dataset.document_indices.astype("<i8").tobytes()).hexdigest(),
            "tokens": int(dataset.sequence_lengths.sum()),
            "tokens_sha256": tokens.hexdigest(),
            "arrow": {
                "schema": schema,
                "batches": [batch.num_rows for batch in batches],
                "batch_edges": edges,
                "origins_sha256": origins.hexdigest(),
            },
        }
    json.dump({"versions": VERSIONS, "shards": shards}, sys.stdout, indent=1, ensure_ascii=True)
    print()


{"write": write, "read": read}[sys.argv[1]](sys.argv[2])
