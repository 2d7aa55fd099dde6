#!/usr/bin/env python3
"""Writes peers.json: small files written by MosaicML Streaming and datatrove, with all metadata.

    python3 -m venv peers && peers/bin/pip install mosaicml-streaming==0.13.0 datatrove==0.9.0
    peers/bin/python shards/formats/testdata/peers.py

The MDS files have a hash of every algorithm that the package supports, except algorithms of OpenSSL
that are missing in some builds of Python 3.11.
"""

import importlib.metadata, json, pathlib, tempfile

import numpy
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from streaming import MDSWriter
from streaming.base.hashing import get_hashes

DOCUMENTS = [[1, 2, 299], [3, 299], [7, 7, 7, 8, 299], [256, 299]]


def files(folder):
    return {p.name: p.read_bytes().hex() for p in sorted(pathlib.Path(folder).iterdir())}


def mds(compression):
    hashes = sorted(
        h
        for h in get_hashes()
        if h.startswith(("md5", "sha1", "sha2", "sha3_", "sha5", "blake2", "xxh")) or h == "sha384"
    )
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=folder, columns={"tokens": "ndarray:uint16"}, compression=compression, hashes=hashes) as out:
            for ids in DOCUMENTS:
                out.write({"tokens": numpy.array(ids, numpy.uint16)})
        return {
            "writer": "mosaicml-streaming " + importlib.metadata.version("mosaicml-streaming"),
            "open": "",
            "files": files(folder),
            "hashes": hashes,
        }


def datatrove():
    with tempfile.TemporaryDirectory() as folder:
        out = TokenizedFile(
            folder, "x.ds", tokenizer_name_or_path="some/tokenizer", save_final_metadata=True, token_size=2
        )
        for ids in DOCUMENTS:
            out.write(ids, None)
        out.close()
        return {
            "writer": "datatrove " + importlib.metadata.version("datatrove"),
            "open": "x.ds",
            "files": files(folder),
        }


if __name__ == "__main__":
    text = json.dumps({"documents": DOCUMENTS, "shards": [mds(None), mds("zstd"), datatrove()]}, indent=1)
    (pathlib.Path(__file__).parent / "peers.json").write_text(text + "\n")
