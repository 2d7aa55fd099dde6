#!/usr/bin/env python3
"""Builds every case of cases.py with Megatron core and with mula, and compares all files.

    make conformance                                    # this, and the other scripts of this folder
    DIR/torch/bin/python conformance/compare.py --environments DIR [--versions 0.16.1 0.9.0]
        [--count 200] [--only TEXT] [--threads N] [--keep DIR]

Names and bytes must be equal. If the original refuses, crashes or never ends, mula has to refuse.
Releases up to 0.6 silently write a blend with more samples than a file has; mula may refuse it.
`mula index verify` also checks the original's files. The script prints each case without equal
bytes, and exits with 1 if a case fails.
"""

import argparse, collections, filecmp, hashlib, json, os, pathlib, shutil, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here))
import cases

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--environments", type=pathlib.Path, required=True, help="folder that environments.sh made")
ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
ap.add_argument("--versions", nargs="+", default=list(cases.PROFILES))
ap.add_argument("--count", type=int, default=200, help="random configurations a version")
ap.add_argument(
    "--large", action="store_true", help="add cases of millions of documents (a few GB in the temporary folder)"
)
ap.add_argument("--only", default="", help="only cases with this text in their name")
ap.add_argument("--threads", type=int, default=2, help="of mula")
ap.add_argument("--keep", type=pathlib.Path, help="keep inputs and caches of cases that differ in this folder")
ap.add_argument("--no-verify", action="store_true", help="skip `mula index verify`")


def command(mula, case, version, root, cache, threads):
    """Returns the command line with which mula writes the case's cache."""
    line = [
        mula,
        "index",
        "--for",
        "megatron",
        "--profile",
        cases.PROFILES[version],
        "--arithmetic",
        cases.arithmetic(version),
        "--cache",
        cache,
        "--root",
        root,
        "--threads",
        threads,
        "--seq-length",
        case["sequence_length"],
        f"--seed={case['seed']}",
    ]
    for split, n in zip(("train", "valid", "test"), case["sizes"]):
        line += [f"--{split}-samples", "none" if n is None else n]
    if case["data_path"] is not None:
        line += ["--data-path", " ".join(case["data_path"]), "--split", case["split"]]
    else:
        for split, words in zip(("train", "valid", "test"), case["per_split"]):
            if words is not None:
                line += [f"--{split}-data-path", " ".join(words)]
    if not case["extra_token"]:
        line += ["--extra-token=false"]
    if case["keep_partial"]:
        line += ["--keep-partial-validation"]
    if case["surplus"] != 0.005:
        line += ["--surplus", repr(case["surplus"])]
    if case["renormalize"]:
        line += ["--renormalize-blend-weights"]
    if cases.release(version) > (0, 4):
        tokenizer = pathlib.Path(root) / "tokenizer-object.json"
        tokenizer.write_text(json.dumps(case["tokenizer"]))
        line += ["--tokenizer-json", tokenizer]
    return [str(word) for word in line]


def data(cache):
    """Returns the names of a cache's files, without mula's own files."""
    return sorted(name for name in os.listdir(cache) if not name.startswith(".")) if os.path.isdir(cache) else []


def differences(theirs, mine):
    """Describes the difference between two caches; empty if they are equal."""
    a, b = data(theirs), data(mine)
    if a != b:
        missing, more = sorted(set(a) - set(b)), sorted(set(b) - set(a))
        return f"{len(missing)} files missing, {len(more)} too many: {' '.join((missing + more)[:3])}"
    unequal = [name for name in a if not filecmp.cmp(f"{theirs}/{name}", f"{mine}/{name}", shallow=False)]
    return f"{len(unequal)} of {len(a)} files differ: {' '.join(unequal[:3])}" if unequal else ""


def oversamples(cache):
    """Reports whether a blend draws more samples from a dataset than the dataset has.

    It reads the original's files, and does not rely on mula.
    """
    import numpy

    names = data(cache)
    for name in names:
        if "-BlendedDataset-" not in name or not name.endswith("description.txt"):
            continue
        drawn = numpy.load(f"{cache}/{name.removesuffix('description.txt')}dataset_index.npy")
        for i, member in enumerate(json.loads(pathlib.Path(cache, name).read_text())["datasets"]):
            digest = hashlib.md5(json.dumps(member, indent=4).encode()).hexdigest()
            [shuffle] = [other for other in names if other.startswith(digest) and other.endswith("shuffle_index.npy")]
            if numpy.count_nonzero(drawn == i) > len(numpy.load(f"{cache}/{shuffle}", mmap_mode="r")):
                return True
    return False


def run_mula(line):
    """Runs mula and returns its exit code and the last line of its error output.

    A crash of mula does not count as a refusal.
    """
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode < 0 or "goroutine " in done.stderr:
        sys.exit(f"mula crashed:\n{' '.join(line)}\n{done.stderr}")
    lines = [text for text in done.stderr.strip().splitlines() if text]
    return done.returncode, lines[-1].removeprefix("mula: ") if lines else ""


def original(environments, version, jobs, tmp, seconds=6):
    """Runs a release of Megatron core on jobs, see original.py, and returns its results."""
    with open(f"{tmp}/jobs", "w") as f:
        json.dump(jobs, f)
    done = subprocess.run(
        [
            environments / f"megatron-{version}" / "bin" / "python",
            here / "original.py",
            f"{tmp}/jobs",
            f"{tmp}/results",
            str(seconds),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"megatron-core {version} cannot be run:\n{done.stderr}")
    with open(f"{tmp}/results") as f:
        ran = json.load(f)
    assert ran["versions"]["megatron-core"] == version.removesuffix("-fma"), ran["versions"]
    return ran


def judge(case, theirs, cache, code, message, mine):
    """Returns a case's outcome: a class for the count, whether it is correct, and a sentence."""
    ran = theirs["status"] == "wrote"
    said = f"original: {theirs['status']}, {theirs['message'].splitlines()[0] if theirs['message'] else ''}"
    if ran and code == 0:
        found = differences(cache, mine)
        return ("different", False, found) if found else ("equal", True, "")
    if not ran and code != 0:
        return "both refuse", True, f"{said[:100]} | mula: {message[:200]}"
    if ran and oversamples(cache):
        return "mula refuses an oversampled blend", True, f"mula: {message[:200]}"
    if ran:
        return "mula refuses", "choice" in case, f"{case.get('choice', '')} | mula: {message[:200]}"
    if theirs["status"] == "refused" and not differences(cache, mine):
        return "equal, but refused", True, f"{said[:160]} after it had written the same bytes"
    return "mula writes", False, said


def compare(version, args):
    counts, table, right, files = collections.Counter(), [], True, 0
    with tempfile.TemporaryDirectory() as tmp:
        chosen = [c for c in cases.cases(version, args.count, args.large) if args.only in c["name"]]
        jobs = []
        for i, case in enumerate(chosen):
            root = f"{tmp}/{i}/data"
            os.makedirs(root)
            cases.write_inputs(case, root)
            jobs.append({"case": case, "root": root, "cache": f"{tmp}/{i}/original"})
        ran = original(args.environments, version, jobs, tmp)
        for i, (job, theirs) in enumerate(zip(jobs, ran["results"])):
            case, mine = job["case"], f"{tmp}/{i}/mula"
            code, message = run_mula(command(args.mula, case, version, job["root"], mine, args.threads))
            if theirs["status"] == "endless" and code == 0:  # or only slow?
                shutil.rmtree(job["cache"])
                theirs = original(args.environments, version, [job], tmp, seconds=120)["results"][0]
            word, ok, sentence = judge(case, theirs, job["cache"], code, message, mine)
            if word == "equal":
                files += len(data(mine))
            if word == "equal" and not args.no_verify:
                code, message = run_mula([str(args.mula), "index", "verify", "--root", job["root"], job["cache"]])
                if code != 0:
                    word, ok, sentence = "not verified", False, f"{sentence} mula index verify: {message}"
            counts[word] += 1
            if word != "equal":
                table.append((ok, word, case["name"], sentence))
            right = right and ok
            if not ok and args.keep:
                kept = args.keep / f"{version}-{i}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(f"{tmp}/{i}", kept)
                (kept / "case.json").write_text(json.dumps(case, indent=1))
            shutil.rmtree(f"{tmp}/{i}")
    print(
        f"megatron-core {version} (numpy {ran['versions']['numpy']}), profile {cases.PROFILES[version]}: {len(chosen)} "
        "configurations, "
        f"{files} files equal: " + ", ".join(f"{n} {word}" for word, n in counts.most_common())
    )
    for ok, word, name, sentence in table:
        print(f"  {'' if ok else 'WRONG '}{name}: {word}{': ' if sentence else ''}{sentence}")
    sys.stdout.flush()
    return right


if __name__ == "__main__":
    args = ap.parse_args()
    results = [compare(version, args) for version in args.versions]
    sys.exit(0 if all(results) else 1)
