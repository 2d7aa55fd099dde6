#!/usr/bin/env python3
"""Compares shards that mula converts with other frameworks, in both directions.

    conformance/layouts.py --frameworks PYTHON --dolma PYTHON
        [--golden shards/formats/testdata/layouts.json]

The first PYTHON is an interpreter with mosaicml-streaming, datatrove (and humanize), ai2-olmo-core,
megatron-core and pyarrow. The second has dolma, which needs numpy 1. This makes both, as
DIR/layouts/bin/python and DIR/dolma-1.2.1/bin/python:

    conformance/environments.sh DIR layouts dolma-1.2.1

1. megatron-core writes shards. `mula convert` converts each to every layout. The layout's framework
   must read the same tokens in the same documents.
2. Each framework's own writer writes shards. `mula convert` converts them to Megatron's layout, and
   megatron-core must read the same tokens in the same documents.

fms-fsdp is not on PyPI: pyarrow reads its files as its Streaming_Doc_Dataset does, and
csv.DictReader the counts. nanotron reads its files with datatrove's DatatroveFileDataset. --golden
writes small files of the frameworks' own writers, and their documents, to the file that the Go
tests read.
"""

import argparse, csv, gzip, hashlib, json, os, pathlib, random, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent

# Name, vocabulary (which determines the element type), number of documents, greatest length.
CASES = [("small", 50280, 40, 30), ("wide", 100278, 300, 400), ("long", 50280, 5, 70_000), ("one", 50280, 1, 3)]


def documents(name, vocabulary, count, longest):
    """Returns documents by formula. Only the last id of each document is vocabulary - 1."""
    draw = random.Random(name)
    out = []
    for d in range(count):
        out.append([draw.randrange(vocabulary - 1) for _ in range(draw.randrange(longest))] + [vocabulary - 1])
    return out


def digest(docs):
    return hashlib.sha256(json.dumps([[int(t) for t in d] for d in docs]).encode()).hexdigest()


# The functions that run inside an environment. Each has a JSON object as its argument, and returns
# a value that JSON can represent.


def megatron_write(path, docs, vocabulary):
    import numpy, torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(path + ".bin", dtype=DType.optimal_dtype(vocabulary))
    for d in docs:
        builder.add_document(torch.from_numpy(numpy.array(d, numpy.int64)), [len(d)])
    builder.finalize(path + ".idx")


def megatron_read(path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(path)
    bounds = data.document_indices
    return digest(
        [[t for s in range(bounds[d], bounds[d + 1]) for t in data[s].tolist()] for d in range(len(bounds) - 1)]
    )


def dolma_read(path, vocabulary):
    """Reads documents by the list and by the end-of-document id, and with OLMo-core's dataset."""
    import numpy
    from olmo_core.data import NumpyDatasetConfig, NumpyFSLDataset  # noqa: F401
    from olmo_core.data.utils import iter_document_indices

    file = path + ".npy"
    dtype = {"uint8": numpy.uint8, "uint16": numpy.uint16, "uint32": numpy.uint32}[
        str(numpy.min_scalar_type(vocabulary - 1))
    ]
    data = numpy.memmap(file, dtype, mode="r")
    listed = [data[a:b].tolist() for a, b in iter_document_indices(file, use_array_if_local=False, dtype=dtype)]
    found = [data[a:b].tolist() for a, b in iter_document_indices(file, eos_token_id=vocabulary - 1, dtype=dtype)]
    assert listed == found, "the list has other documents than the ids"
    length = 3
    windows = NumpyFSLDataset(
        file, sequence_length=length, pad_token_id=0, eos_token_id=vocabulary - 1, vocab_size=vocabulary, dtype=dtype
    )
    windows.prepare()
    flat = [t for d in listed for t in d]
    assert [windows[i]["input_ids"].tolist() for i in range(len(windows))] == [
        flat[i : i + length] for i in range(0, len(flat) - length + 1, length)
    ], "other windows"
    return digest(listed)


def datatrove_read(path, vocabulary):
    """Reads the windows and positions of nanotron's dataset, and the files with datatrove's merger.
    """
    import numpy
    from datatrove.utils.dataset import DatatroveFileDataset

    with open(path + ".ds.metadata") as f:
        size = int(f.readline().rstrip("\n").split("|")[1])
        total = int(f.readline())
    ends = numpy.fromfile(path + ".ds.index", "<u8").tolist()
    tokens = numpy.fromfile(path + ".ds", "<u2" if size == 2 else "<u4")
    assert total == len(tokens) == ends[-1], (total, len(tokens), ends[-1:])
    length = 9
    data = DatatroveFileDataset(path + ".ds", seq_len=length, token_size=size, return_positions=True)
    starts = [0] + ends
    for i in range(len(data)):
        item = data[i]
        first = i * (length + 1)
        assert item["input_ids"].tolist() == tokens[first : first + length + 1].tolist(), "other windows"
        want = [
            p - max(s for s in starts if s <= p) if any(first < s <= p for s in starts) else p - first
            for p in range(first, first + length + 1)
        ]
        assert item["positions"].tolist() == want, ("other positions", item["positions"].tolist(), want)
    return digest([tokens[a:b].tolist() for a, b in zip(starts, ends)])


def mds_read(path, vocabulary):
    from streaming import StreamingDataset

    data = StreamingDataset(local=path, shuffle=False, batch_size=1, validate_hash="sha256")
    samples = [data[i] for i in range(data.num_samples)]
    assert all(
        s["tokens"].dtype.itemsize == (2 if vocabulary <= 65536 else 4) and isinstance(s["id"], str) for s in samples
    )
    return digest([s["tokens"].tolist() for s in samples])


def fms_read(path, vocabulary):
    import pyarrow as pa

    file = pathlib.Path(path + ".arrow")
    root = file.parent.parent
    counts = [x for x in os.listdir(root / "meta") if "counts" in x and "csv" in x]
    assert len(counts) == 1, counts
    with open(root / "meta" / counts[0]) as f:
        rows = {row["dataset/filename"]: int(row["documents"]) for row in csv.DictReader(f)}
    assert [p.name for p in file.parent.iterdir() if "arrow" in p.suffix] == [file.name], (
        "files that fms-fsdp would treat as shards"
    )
    with pa.memory_map(str(file)) as source:
        reader = pa.ipc.open_file(source)
        assert rows[f"/{file.parent.name}/{file.name}"] == reader.num_record_batches
        out = []
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            batch.validate(full=True)
            column = batch["tokens"]
            out.append(column.to_pylist())
            assert column.slice(1, 2).to_pylist() == out[-1][1:3]
        assert reader.schema == pa.schema([pa.field("tokens", pa.uint32())]), reader.schema
    return digest(out)


def mds_write(path, docs, kind, compression, hashes, limit=1 << 12, extra=True):
    import numpy
    from streaming import MDSWriter

    column = {
        "dynamic": "ndarray",
        "uint16": "ndarray:uint16",
        "uint32": "ndarray:uint32",
        "int32": "ndarray:int32",
        "bytes": "bytes",
        "fixed": "ndarray:uint16:4",
    }[kind]
    dtype = {"dynamic": "uint16", "bytes": "int64", "fixed": "uint16"}.get(kind, kind)
    columns = {"tokens": column, "id": "str"} | ({"n": "int"} if extra else {})
    with MDSWriter(columns=columns, out=path, compression=compression, hashes=hashes, size_limit=limit) as out:
        for i, d in enumerate(docs):
            value = numpy.array(d, dtype)
            sample = {"tokens": value.tobytes() if kind == "bytes" else value, "id": f"doc-{i}", "n": i}
            out.write({name: sample[name] for name in columns})


def datatrove_write(path, docs, vocabulary, index):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    folder, name = os.path.split(path)
    f = TokenizedFile(
        folder,
        name + ".ds",
        save_index=index,
        tokenizer_name_or_path="some/tokenizer",
        save_final_metadata=True,
        token_size=2 if vocabulary <= 65536 else 4,
    )
    for d in docs:
        f.write(d, None)
    f.close()


def datatrove_tokenize(folder, texts, tokenizer):
    """Runs datatrove's own pipeline, which shuffles: documents are compared as a set."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(
        output_folder=folder,
        tokenizer_name_or_path=tokenizer,
        eos_token="<|endoftext|>",
        local_working_dir=None,
        save_filename="x",
        shuffle_documents=True,
        seed=1,
    )
    step.run((Document(text=t, id=str(i)) for i, t in enumerate(texts)), 0, 1)


def fms_write(path, docs, dtype):
    import pyarrow as pa

    schema = pa.schema(
        [pa.field("documents", pa.string()), pa.field("tokens", getattr(pa, dtype)())]
        if dtype == "int64"
        else [pa.field("tokens", getattr(pa, dtype)())]
    )
    with pa.OSFile(path + ".arrow", "wb") as sink, pa.ipc.new_file(sink, schema) as out:
        for d in docs:
            arrays = {"tokens": pa.array(d, getattr(pa, dtype)()), "documents": pa.array(["x"] * len(d))}
            out.write(pa.record_batch([arrays[n] for n in schema.names], schema))


def dolma_write(path, docs, vocabulary):
    import numpy
    from dolma.tokenizer.data_types import TokenizerOutput
    from dolma.tokenizer.memmap_writer import MemmapWriter

    with MemmapWriter(
        path=path, dtype=numpy.dtype(str(numpy.min_scalar_type(vocabulary - 1))), max_tokens=sum(map(len, docs)) + 1
    ) as out:
        for i, d in enumerate(docs):
            assert out.write(TokenizerOutput.from_tokens(id=f'doc "{i}", é', src="part,0.json.gz", loc=i + 1, tokens=d))


def tokenizer_make(path, texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made = json.loads(t.to_str())
    made["model"]["merges"] = [
        " ".join(m) for m in made["model"]["merges"]
    ]  # the older form, which dolma's tokenizers supports
    pathlib.Path(path).write_text(json.dumps(made))
    return [t.encode(x).ids + [0] for x in texts]


def versions(names):
    import importlib.metadata

    return {n: importlib.metadata.version(n) for n in names} | {"python": sys.version.split()[0]}


def inside():
    """Answers calls, one on each line, until standard input ends."""
    import traceback, warnings

    warnings.simplefilter("ignore")
    # Otherwise scripts here would hide packages of the same name.
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != here]
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"result": globals()[call["function"]](**call["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        with open(call["answer"], "w") as f:
            json.dump(answer, f)
        print("\nanswered", flush=True)


class Environment:
    """An environment's Python, which runs functions of this file."""

    def __init__(self, python, tmp):
        self.answer = f"{tmp}/answer-{len(os.listdir(tmp))}"
        open(self.answer, "w").close()
        env = dict(os.environ, LOGURU_LEVEL="ERROR", TOKENIZERS_PARALLELISM="false")
        self.process = subprocess.Popen(
            [python, __file__, "--inside"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )

    def __call__(self, function, **arguments):
        self.process.stdin.write(
            json.dumps({"function": function.__name__, "arguments": arguments, "answer": self.answer}) + "\n"
        )
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "answered\n":
            if not line:
                sys.exit(f"{function.__name__}: the process ended")
        answer = json.loads(pathlib.Path(self.answer).read_text())
        if "error" in answer:
            sys.exit(f"{function.__name__} failed:\n{answer['error']}")
        return answer["result"]


READERS = {
    "megatron": megatron_read,
    "dolma": dolma_read,
    "datatrove": datatrove_read,
    "mds": mds_read,
    "fms": fms_read,
}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "--frameworks",
        required=True,
        help="a Python with mosaicml-streaming, datatrove, ai2-olmo-core, megatron-core, pyarrow",
    )
    ap.add_argument("--dolma", required=True, help="a Python with dolma")
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--golden", type=pathlib.Path)
    args = ap.parse_args()
    checked, wrong = 0, []

    def convert(to, output, *inputs):
        subprocess.run(
            [str(x) for x in [args.mula, "convert", "--to", to, "--output", output, *inputs]],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def check(what, got, want):
        nonlocal checked
        checked += 1
        if got != want:
            wrong.append(what)
        print("equal" if got == want else "WRONG", what, flush=True)

    def read(layout, path, vocabulary):
        return frameworks(
            READERS[layout], path=str(path), **({} if layout == "megatron" else {"vocabulary": vocabulary})
        )

    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        frameworks, dolma = Environment(args.frameworks, tmp), Environment(args.dolma, tmp)
        for name, vocabulary, count, longest in CASES:
            docs = documents(name, vocabulary, count, longest)
            want = digest(docs)
            root = tmp / name
            root.mkdir()
            (root / "in").mkdir()
            frameworks(megatron_write, path=str(root / "in/x"), docs=docs, vocabulary=vocabulary)
            for layout in READERS:
                out = root / f"to-{layout}" / "set" / "x"
                convert(layout, out, root / "in/x.idx", "--vocab-size", vocabulary, "--eod", vocabulary - 1)
                check(f"{name}: {layout} reads what mula wrote", read(layout, out, vocabulary), want)
            # from each layout to each other
            for first in READERS if name == "small" else []:
                for layout in READERS:
                    out = root / f"{first}-to-{layout}" / "set" / "x"
                    convert(layout, out, root / f"to-{first}" / "set" / "x")
                    check(
                        f"{name}: {layout} reads what mula wrote, by way of {first}",
                        read(layout, out, vocabulary),
                        want,
                    )

            # the frameworks' own writers
            own = []
            for kind in (
                ["dynamic", "uint16", "fixed", "bytes"] if vocabulary <= 65536 else ["uint32", "int32", "bytes"]
            ):
                for compression, hashes in (
                    [(None, None), ("zstd:7", ["sha1", "xxh64"]), ("gz", ["sha256"])]
                    if name == "small"
                    else [(None, ["sha1"])]
                ):
                    some = [(d * 4)[:4] for d in docs] if kind == "fixed" else docs
                    path = root / f"mds-{kind}-{(compression or 'plain').replace(':', '')}"
                    frameworks(mds_write, path=str(path), docs=some, kind=kind, compression=compression, hashes=hashes)
                    own.append(
                        (
                            f"MDSWriter, {kind}, {compression}",
                            path,
                            ["--dtype", "int64"] if kind == "bytes" else [],
                            some,
                        )
                    )
            for index in [True, False]:
                path = root / f"ds-{index}"
                path.mkdir()
                frameworks(datatrove_write, path=str(path / "x"), docs=docs, vocabulary=vocabulary, index=index)
                own.append(
                    (
                        f"TokenizedFile, {'with' if index else 'without'} index",
                        path / "x.ds",
                        ["--vocab-size", vocabulary] + ([] if index else ["--eod", vocabulary - 1]),
                        docs,
                    )
                )
            for dtype in ["uint32", "int64"] + (["uint16"] if vocabulary <= 65536 else []):
                path = root / f"fms-{dtype}"
                path.mkdir()
                frameworks(fms_write, path=str(path / "x"), docs=docs, dtype=dtype)
                own.append((f"pyarrow, {dtype}", path / "x.arrow", [], docs))
            dolma(dolma_write, path=str(root / "npy" / "x"), docs=docs, vocabulary=vocabulary)
            own.append(("dolma's MemmapWriter", root / "npy" / "x.npy", ["--vocab-size", vocabulary], docs))
            for what, path, flags, docs_there in own:
                out = root / ("read-" + path.parent.name + path.name) / "x"
                convert("megatron", out, path, *flags)
                check(f"{name}: mula reads {what}", read("megatron", out, vocabulary), digest(docs_there))

            # mula's folder equals MDSWriter's, byte for byte, with one exception: MDSWriter starts
            # with a file without samples if the first sample is larger than the limit.
            path, out, limit = root / "mds-same", root / "mds-again", 5000 if longest < 1000 else 300_000
            frameworks(
                mds_write,
                path=str(path),
                docs=docs,
                kind="uint16" if vocabulary <= 65536 else "uint32",
                compression=None,
                hashes=["sha256"],
                limit=limit,
                extra=False,
            )
            convert("mds", out, path, "--vocab-size", vocabulary, "--mds-size-limit", limit)
            check(
                f"{name}: the files of MDSWriter",
                {p.name: p.read_bytes() for p in out.iterdir() if not p.name.startswith("mula.")},
                {p.name: p.read_bytes() for p in path.iterdir()},
            )

        # Complete pipelines of others, from text. Both shuffle, so documents are compared as a set.
        texts = [f"Document {i} says: " + "lorem ipsum dolor sit amet " * (i % 7) + "." for i in range(60)]
        ids = frameworks(tokenizer_make, path=str(tmp / "tokenizer.json"), texts=texts)
        frameworks(datatrove_tokenize, folder=str(tmp / "trove"), texts=texts, tokenizer=str(tmp / "tokenizer.json"))
        (tmp / "docs").mkdir()
        with gzip.open(tmp / "docs/a.json.gz", "wt") as f:
            for i, t in enumerate(texts):
                f.write(json.dumps({"id": f"doc {i}", "text": t, "source": "x"}) + "\n")
        subprocess.run(
            [
                str(pathlib.Path(args.dolma).parent / "dolma"),
                "tokens",
                "--documents",
                str(tmp / "docs/*.json.gz"),
                "--destination",
                str(tmp / "npy"),
                "--tokenizer.name_or_path",
                str(tmp / "tokenizer.json"),
                "--tokenizer.eos_token_id",
                "0",
                "--tokenizer.pad_token_id",
                "0",
                "--dtype",
                "uint16",
                "--processes",
                "1",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for what, found in [
            ("datatrove's DocumentTokenizer", [p for p in (tmp / "trove").rglob("*.ds")]),
            ("dolma tokens", [p for p in (tmp / "npy").rglob("*.npy")]),
        ]:
            assert found, what
            convert("dolma", tmp / ("all-" + found[0].suffix[1:]) / "x", *sorted(found), "--dtype", "uint16")
            file = tmp / ("all-" + found[0].suffix[1:]) / "x"
            with gzip.open(str(file) + ".csv.gz", "rt", newline="") as f:
                rows = list(csv.reader(f))
            width = 2 if (file.parent / "x.json").read_text().find('"uint16"') > 0 else 4
            data = open(str(file) + ".npy", "rb").read()
            got = sorted(
                [int.from_bytes(data[width * k : width * k + width], "little") for k in range(int(a), int(b))]
                for a, b, *_ in rows
            )
            check(f"mula reads {what}, {len(found)} files", got, sorted(ids))
        if args.golden:
            golden(args.golden, frameworks, dolma, tmp / "golden")
    print(f"{checked} comparisons, {len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


def golden(path, frameworks, dolma, tmp):
    """Writes small files of the frameworks' own writers, in hexadecimal, and their documents."""
    tmp.mkdir()
    docs = [[5, 50279], [1, 2, 3, 300, 50279], [50279], list(range(260)) + [50279]]
    wide = [[5, 100277], [99999, 65536, 100277]]
    cases = []

    def add(writer, folder, open_, documents, **more):
        files = {str(p.relative_to(folder)): p.read_bytes().hex() for p in sorted(folder.rglob("*")) if p.is_file()}
        cases.append({"writer": writer, "open": open_, "files": files, "documents": documents} | more)

    for kind, compression, hashes, some in [
        ("uint16", None, ["sha256"], docs),
        ("dynamic", None, None, docs),
        ("fixed", "gz", ["sha1"], [d[:4] for d in docs if len(d) > 3]),
        ("bytes", "zstd", ["sha1", "xxh64"], docs),
        ("int32", None, [], wide),
        ("uint32", None, [], wide),
    ]:
        folder = tmp / f"mds-{kind}"
        frameworks(mds_write, path=str(folder), docs=some, kind=kind, compression=compression, hashes=hashes)
        add(
            "streaming.MDSWriter",
            folder,
            ".",
            some,
            ids=[f"doc-{i}" for i in range(len(some))],
            dtype="int64" if kind == "bytes" else "",
        )
    same = docs * 4
    frameworks(
        mds_write,
        path=str(tmp / "mds-same"),
        docs=same,
        kind="uint16",
        compression=None,
        hashes=["sha256"],
        limit=1100,
        extra=False,
    )
    add("streaming.MDSWriter", tmp / "mds-same", ".", same, ids=[f"doc-{i}" for i in range(len(same))], limit=1100)
    for name, vocabulary, some, index in [
        ("ds", 50280, docs, True),
        ("ds-wide", 100278, wide, True),
        ("ds-bare", 50280, docs, False),
    ]:
        (tmp / name).mkdir()
        frameworks(datatrove_write, path=str(tmp / name / "x"), docs=some, vocabulary=vocabulary, index=index)
        add("datatrove.TokenizedFile", tmp / name, "x.ds", some, eod=-1 if index else 50279)
    for dtype, some in [("uint32", wide), ("int64", docs)]:
        (tmp / dtype).mkdir()
        frameworks(fms_write, path=str(tmp / dtype / "x"), docs=some, dtype=dtype)
        add("pyarrow.ipc", tmp / dtype, "x.arrow", some)
    for name, vocabulary, some in [("npy", 50280, docs), ("npy-wide", 100278, wide)]:
        dolma(dolma_write, path=str(tmp / name / "x"), docs=some, vocabulary=vocabulary)
        add("dolma.MemmapWriter", tmp / name, "x", some, ids=[f'doc "{i}", é' for i in range(len(some))])
    names = frameworks(versions, names=["mosaicml-streaming", "datatrove", "humanize", "pyarrow", "numpy"]) | dolma(
        versions, names=["dolma"]
    )
    lines = [json.dumps({"eod": -1, "dtype": ""} | c, separators=(",", ":"), ensure_ascii=False) for c in cases]
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        '{"script":"conformance/layouts.py","versions":%s,"cases":[\n%s\n]}\n' % (json.dumps(names), ",\n".join(lines))
    )
    print(f"{path.name}: {len(lines)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        inside()
    else:
        main()
