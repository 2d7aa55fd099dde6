#!/usr/bin/env python3
"""Loads caches of mula in Megatron core, and proves that both have the same samples.

    DIR/torch/bin/python conformance/read.py --environments DIR [--versions 0.16.1 …]

For each case mula writes the cache, and Megatron core's builder reads it. Every function that
builds or saves an index is patched to raise, and no file may be written again. The fifteen lines of
docs/formats/fingerprints.md hash the first 1,000 training samples into a log. `mula verify`
compares it with the log that `mula hash` makes of the same cache under `order: megatron`.
"""

import argparse, json, os, pathlib, re, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here))
import cases, compare

SAMPLES, BATCH = 1000, 50


def chosen():
    files = {"f0": cases.shape(0, 400), "sub/f1": cases.shape(1, 250), "f2": cases.shape(2, 600)}
    weighted = ["0.5", "f0", "0.2", "sub/f1", "0.3", "f2"]
    common = dict(files=files, split="70,20,10", sizes=[1500, 40, 10])
    return [
        cases.base(name="three weighted files", data_path=weighted, **common),
        cases.base(name="one file, several epochs", data_path=["f0"], **common),
        cases.base(
            name="no weights", data_path=["f0", "sub/f1", "f2"], files=files, split="90,5,5", sizes=[1200, None, None]
        ),
        cases.base(name="exhaustive", data_path=["f0", "sub/f1", "f2"], files=files, split="90,5,5", sizes=[None] * 3),
        cases.base(
            name="per-split blends",
            per_split=[weighted, ["f2"], None],
            files=files,
            sizes=[1500, 40, 10],
            sequence_length=100,
        ),
        cases.base(name="no extra token", data_path=weighted, extra_token=False, **common),
        cases.base(
            name="sequence length 1",
            data_path=["f0"],
            files=files,
            split="70,20,10",
            sizes=[1500, 40, 10],
            sequence_length=1,
        ),
    ]


def listing(cache):
    return {name: os.stat(f"{cache}/{name}").st_mtime_ns for name in compare.data(cache)}


def inside(jobs, results):
    """Loads the caches with Megatron core, in the environment's Python."""
    import warnings

    warnings.simplefilter("ignore")
    import numpy
    import original
    from megatron.core.datasets import gpt_dataset, helpers

    def refuse(*args, **kwargs):
        raise AssertionError("Megatron core builds or saves an index although one exists")

    modules = [gpt_dataset, helpers]
    try:
        from megatron.core.datasets import helpers_cpp

        modules.append(helpers_cpp)
    except ImportError:
        pass
    refused = [(gpt_dataset, "_build_document_index"), (gpt_dataset, "_build_shuffle_index"), (numpy, "save")]
    refused += [(module, name) for module in modules[1:] for name in dir(module) if name.startswith("build_")]
    for module, name in refused:
        setattr(module, name, refuse)
    text = (here.parent / "docs" / "formats" / "fingerprints.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    scope = {}
    exec(program, scope)
    out = []
    try:  # or else these patches would prove nothing
        os.chdir(jobs[0]["root"])
        original.builder(jobs[0]["case"], jobs[0]["cache"] + "-empty").build()
    except AssertionError as e:
        assert str(e) == "Megatron core builds or saves an index although one exists", e
    else:
        raise AssertionError("Megatron core built an index in spite of the patches")
    for job in jobs:
        case = job["case"]
        os.chdir(job["root"])
        before = listing(job["cache"])
        dataset = original.builder(case, job["cache"]).build()[0]

        def sample(k):
            item = dataset[k]
            ids = item["tokens"].tolist()
            return ids + [int(item["labels"][-1])] if case["extra_token"] else ids

        length = case["sequence_length"] - (not case["extra_token"])
        batches = ((first, [sample(k) for k in range(first, first + BATCH)]) for first in range(0, SAMPLES, BATCH))
        with open(job["log"], "w") as f:
            scope["write_log"](f, "megatron-core", length, BATCH, batches)
        out.append(
            {
                "written": [name for name, at in listing(job["cache"]).items() if before.get(name) != at],
                "samples": len(dataset),
                "class": type(dataset).__name__,
            }
        )
    pathlib.Path(results).write_text(json.dumps({"refused": len(refused), "results": out}))


def read(version, args):
    right = True
    with tempfile.TemporaryDirectory() as tmp:
        jobs = []
        for i, case in enumerate(chosen()):
            case = cases.restrict(case, version)
            root = f"{tmp}/{i}/data"
            os.makedirs(root)
            cases.write_inputs(case, root, tokens=True)
            code, message = compare.run_mula(compare.command(args.mula, case, version, root, f"{tmp}/{i}/cache", 2))
            if code != 0:
                sys.exit(f"{case['name']}: {message}")
            jobs.append({"case": case, "root": root, "cache": f"{tmp}/{i}/cache", "log": f"{tmp}/{i}/megatron.jsonl"})
        pathlib.Path(f"{tmp}/jobs").write_text(json.dumps(jobs))
        done = subprocess.run(
            [
                args.environments / f"megatron-{version}" / "bin" / "python",
                here / "read.py",
                "--inside",
                f"{tmp}/jobs",
                f"{tmp}/results",
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"megatron-core {version} cannot load mula's cache:\n{done.stderr}")
        ran = json.loads(pathlib.Path(f"{tmp}/results").read_text())
        print(
            f"megatron-core {version} loads mula's cache; {ran['refused']} functions that build or save patched to "
            "raise"
        )
        for i, (job, result) in enumerate(zip(jobs, ran["results"])):
            pathlib.Path(f"{tmp}/{i}/blend.yaml").write_text(
                "order: megatron\nmegatron:\n  cache: cache\n  root: data\n"
            )
            verdict = ""
            for line in (
                ["blend", "--config", f"{tmp}/{i}/blend.yaml", "--output", f"{tmp}/{i}/plan.json"],
                [
                    "hash",
                    "--plan",
                    f"{tmp}/{i}/plan.json",
                    "--batch-size",
                    BATCH,
                    "--steps",
                    f"0:{SAMPLES // BATCH}",
                    "--output",
                    f"{tmp}/{i}/mula.jsonl",
                ],
                ["verify", job["log"], f"{tmp}/{i}/mula.jsonl"],
            ):
                done = subprocess.run([str(word) for word in [args.mula, *line]], capture_output=True, text=True)
                if done.returncode != 0:
                    verdict = f"mula {line[0]}: {(done.stderr + done.stdout).strip()}"
                    break
            else:
                # `verify` skips steps that only one of the logs has, so both must be complete.
                whole = [sum(1 for _ in open(log)) for log in (job["log"], f"{tmp}/{i}/mula.jsonl")]
                if whole != [1 + SAMPLES // BATCH] * 2:
                    verdict = f"the logs have {whole} lines"
            if result["written"]:
                verdict = f"{verdict} written again: {' '.join(result['written'])}"
            print(
                f"  {'WRONG ' if verdict else ''}{job['case']['name']}: {result['class']} of {result['samples']} "
                f"samples: {verdict or f'same {SAMPLES} samples'}"
            )
            right = right and not verdict
    sys.stdout.flush()
    return right


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--environments", type=pathlib.Path, required=True)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--versions", nargs="+", default=["0.7.0", "0.10.0", "0.13.1", "0.16.1"])
    args = ap.parse_args()
    results = [read(version, args) for version in args.versions]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.loads(pathlib.Path(sys.argv[2]).read_text()), sys.argv[3])
    else:
        main()
