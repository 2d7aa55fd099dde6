#!/usr/bin/env python3
"""Compares the order files for OLMo-core of mula and of ai2-olmo-core's own data loader.

    conformance/olmo.py --environments DIR [--versions 2.6.0 3.0.0]

For each case the loader first builds its own order. Then it reads a folder that mula wrote, with
its building function patched to raise: it has to find mula's file and return the same batches.
OLMo-core 1.x uses another file name and truncates the order, so orders are compared by value.
"""

import argparse, hashlib, json, os, pathlib, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent

# Tokens of each file, sequence length, maximum target sequence length or None, type, seed, epoch,
# sequences in a batch.
CASES = [
    dict(tokens=[4096 * 3 + 17, 100, 9000], length=64, longest=None, dtype="uint16", seed=34521, epoch=1, batch=8),
    dict(tokens=[4096 * 3 + 17, 100, 9000], length=64, longest=None, dtype="uint16", seed=34521, epoch=2, batch=8),
    dict(tokens=[50_000, 12_345, 77], length=32, longest=128, dtype="uint32", seed=7, epoch=3, batch=16),
    dict(tokens=[64 * 1000], length=64, longest=None, dtype="uint16", seed=34521, epoch=1, batch=4),
    dict(tokens=[1_000_003, 65_537], length=16, longest=None, dtype="uint16", seed=0, epoch=1, batch=64),
    dict(tokens=[40, 41, 42], length=8, longest=None, dtype="uint32", seed=4294967295, epoch=9, batch=1),
    dict(tokens=[300, 200], length=50, longest=100, dtype="uint16", seed=6198, epoch=1, batch=2),
    dict(tokens=[3000] * 40, length=128, longest=None, dtype="uint16", seed=6198, epoch=2, batch=8),
]
VERSIONS = ["1.9.0", "2.6.0", "3.0.0"]


def write_tokens(case, root):
    """Writes the case's token files, raw arrays without header, and returns their names."""
    import numpy

    names = []
    for f, n in enumerate(case["tokens"]):
        k = numpy.arange(n, dtype=numpy.uint64)
        names.append(f"{root}/part-{f}.npy")
        (((k * 2654435761 + f * 40503) >> 13) % 50257).astype(
            "<" + {"uint16": "u2", "uint32": "u4"}[case["dtype"]]
        ).tofile(names[-1])
    return names


def inside(jobs, results):
    """Runs jobs with OLMo-core, in the environment's Python."""
    import importlib.metadata, warnings

    warnings.simplefilter("ignore")
    import numpy, torch
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

    old = importlib.metadata.version("ai2-olmo-core").startswith("1.")

    def refuse(self):
        raise AssertionError("OLMo-core builds an order although one exists")

    build = NumpyFSLDataLoader._build_global_indices
    out = []
    for job in jobs:
        case = job["case"]
        os.makedirs(job["work"], exist_ok=True)
        names = write_tokens(case, job["root"])
        dataset = NumpyFSLDataset(
            *names,
            sequence_length=case["length"],
            pad_token_id=-1,
            eos_token_id=0,
            vocab_size=50257,
            dtype=getattr(numpy, case["dtype"]),
            max_target_sequence_length=case["longest"],
        )
        dataset.work_dir = pathlib.Path(job["work"])
        dataset.prepare()
        loader = NumpyFSLDataLoader.wrap_numpy_dataset(
            dataset,
            global_batch_size=case["batch"] * case["length"],
            collator=DataCollator(pad_token_id=0),
            work_dir=job["work"],
            seed=case["seed"],
            num_threads=0,
        )
        NumpyFSLDataLoader._build_global_indices = refuse if job["found"] and not old else build
        loader.reshuffle(epoch=case["epoch"])
        file = loader._global_indices_file
        order = numpy.fromfile(file, dtype="<u4")
        sha, batches = hashlib.sha256(), 0
        for batch in loader:
            sha.update(batch["input_ids"].numpy().astype("<u4").tobytes())
            batches += 1
        loader.reset()
        out.append(
            {
                "name": file.name,
                "md5": hashlib.md5(order.tobytes()).hexdigest(),
                "instances": len(dataset),
                "entries": len(order),
                "batches": batches,
                "sha256": sha.hexdigest(),
                "mtime": file.stat().st_mtime_ns,
            }
        )
    versions = {
        "ai2-olmo-core": importlib.metadata.version("ai2-olmo-core"),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    with open(results, "w") as f:
        json.dump({"versions": versions, "results": out}, f)


def run(environments, version, jobs, tmp):
    pathlib.Path(f"{tmp}/jobs").write_text(json.dumps(jobs))
    done = subprocess.run(
        [
            environments / f"olmo-{version}" / "bin" / "python",
            here / "olmo.py",
            "--inside",
            f"{tmp}/jobs",
            f"{tmp}/results",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"ai2-olmo-core {version} cannot be run:\n{done.stderr}")
    return json.loads(pathlib.Path(f"{tmp}/results").read_text())


def golden(environments, path, version="2.6.0"):
    """Writes the names and MD5s of OLMo-core's own files."""
    with tempfile.TemporaryDirectory() as tmp:
        jobs = []
        for i, case in enumerate(CASES):
            os.makedirs(f"{tmp}/{i}/data")
            jobs.append({"case": case, "root": f"{tmp}/{i}/data", "work": f"{tmp}/{i}/own", "found": False})
        ran = run(environments, version, jobs, tmp)
    lines = [
        json.dumps(
            {"case": j["case"], "name": r["name"], "md5": r["md5"], "instances": r["instances"]}, separators=(",", ":")
        )
        for j, r in zip(jobs, ran["results"])
    ]
    path.write_text(
        '{"script":"conformance/golden.py","versions":%s,"cases":[\n%s\n]}\n'
        % (json.dumps(ran["versions"]), ",\n".join(lines))
    )
    print(f"{path.name}: {len(lines)} cases, {path.stat().st_size} bytes")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--environments", type=pathlib.Path, required=True)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--versions", nargs="+", default=VERSIONS)
    args = ap.parse_args()
    right = True
    for version in args.versions:
        with tempfile.TemporaryDirectory() as tmp:
            jobs = []
            for i, case in enumerate(CASES):
                root, work = f"{tmp}/{i}/data", f"{tmp}/{i}/own"
                os.makedirs(root)
                jobs.append({"case": case, "root": root, "work": work, "found": False})
            own = run(args.environments, version, jobs, tmp)
            written = []
            for i, (case, job) in enumerate(zip(CASES, jobs)):
                job["work"], job["found"] = f"{tmp}/{i}/mula", True
                line = [
                    args.mula,
                    "index",
                    "--for",
                    "olmo",
                    "--dtype",
                    case["dtype"],
                    "--seq-length",
                    case["length"],
                    "--seed",
                    case["seed"],
                    "--epoch",
                    case["epoch"],
                    "--cache",
                    job["work"],
                ]
                if case["longest"]:
                    line += ["--max-target-sequence-length", case["longest"]]
                for f in range(len(case["tokens"])):
                    line += ["--paths", f"{job['root']}/part-{f}.npy"]
                subprocess.run([str(word) for word in line], check=True, stdout=subprocess.DEVNULL)
                files = [p for p in pathlib.Path(job["work"]).iterdir() if p.suffix == ".npy"]
                assert len(files) == 1, files
                written.append((files[0], files[0].stat().st_mtime_ns))
            wrong = []
            if version.startswith("1."):  # its file has only complete batches, and another name
                for i, ((file, _), theirs) in enumerate(zip(written, own["results"])):
                    if hashlib.md5(file.read_bytes()[: 4 * theirs["entries"]]).hexdigest() != theirs["md5"]:
                        wrong.append(f"case {i}: another order")
            else:
                found = run(args.environments, version, jobs, tmp)
                for i, ((file, mtime), theirs, mine) in enumerate(zip(written, own["results"], found["results"])):
                    if file.name != theirs["name"]:
                        wrong.append(f"case {i}: the file is called {file.name}, OLMo-core's {theirs['name']}")
                    elif (
                        mine["md5"] != theirs["md5"]
                        or mine["sha256"] != theirs["sha256"]
                        or mine["batches"] != theirs["batches"]
                    ):
                        wrong.append(f"case {i}: other bytes or batches")
                    elif mine["mtime"] != mtime:
                        wrong.append(f"case {i}: OLMo-core wrote the file again")
        batches = sum(r["batches"] for r in own["results"])
        print(
            f"ai2-olmo-core {version} (numpy {own['versions']['numpy']}): {len(CASES)} orders, {batches} batches: "
            + (
                "; ".join(wrong)
                or (
                    "equal orders"
                    if version.startswith("1.")
                    else "equal files, and the loader returns the same batches from mula's"
                )
            )
        )
        right = right and not wrong
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.loads(pathlib.Path(sys.argv[2]).read_text()), sys.argv[3])
    else:
        main()
