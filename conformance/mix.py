#!/usr/bin/env python3
"""Has Megatron core's own IndexedDataset open the token files of fixtures/mix, sparse and full.

conformance/mix.py --environments DIR [--version 0.16.1]
"""

import argparse, json, pathlib, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent


def inside(root, full):
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    sizes = json.loads(pathlib.Path(root, "sizes.json").read_text())
    for file in sizes["files"]:
        dataset = IndexedDataset(f"{root}/{file['prefix']}", mmap=True)
        lengths = dataset.sequence_lengths
        assert (
            lengths.dtype == numpy.int32
            and len(lengths) == file["documents"]
            and lengths.sum(dtype=numpy.int64) == file["tokens"]
        ), file
        assert (
            len(dataset.document_indices) == file["documents"] + 1 and dataset.document_indices[-1] == file["documents"]
        ), file
        pointers = numpy.concatenate(([0], numpy.cumsum(lengths, dtype=numpy.int64)[:-1])) * 2
        if full:
            assert (dataset.index.sequence_pointers == pointers).all() and (
                dataset.document_indices == numpy.arange(file["documents"] + 1)
            ).all(), file
        else:
            assert dataset.index.sequence_pointers[-1] == pointers[-1], file
    assert sum(f["tokens"] for f in sizes["files"]) == sizes["tokens"]
    print(f"{len(sizes['files'])} files, {sizes['documents']:,} documents, {sizes['tokens']:,} tokens")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--environments", type=pathlib.Path, required=True)
    ap.add_argument("--version", default="0.16.1")
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        for options in ([], ["-full"]):
            root = f"{tmp}/mix{''.join(options)}"
            subprocess.run(
                [
                    "go",
                    "run",
                    "./fixtures/mix",
                    "-fraction",
                    "1e-3",
                    "-files",
                    "200",
                    "-bin",
                    "-output",
                    root,
                    *options,
                ],
                cwd=here.parent,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            done = subprocess.run(
                [
                    args.environments / f"megatron-{args.version}" / "bin" / "python",
                    __file__,
                    "--inside",
                    root,
                    str(len(options)),
                ],
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                sys.exit(f"megatron-core {args.version} does not read fixtures/mix {options}:\n{done.stderr}")
            print(
                f"megatron-core {args.version} reads fixtures/mix {' '.join(options) or 'as it is'}: "
                f"{done.stdout.strip()}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3] == "1")
    else:
        main()
