#!/usr/bin/env python3
"""Makes golden/megatron-*.json and golden/olmo.json for the tests of this folder.

They have the MD5s of the originals' files for a few small cases.

    conformance/golden.py --environments DIR

A file for Megatron core has the versions that made it and a list of {case, files}. files maps each
prefix of file names to the MD5s of its data files, in alphabetical order of their names. The name
of a file has the hash of its description. If the original raises, never ends or dies, files is
null.
"""

import argparse, collections, hashlib, json, os, pathlib, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here))
import cases, compare, olmo

# The newest release and 0.16.1 have more cases. Every other release has a few cases of each feature
# in which releases may differ.
NEWEST = [
    "A:",
    "B:",
    "C:",
    "D:",
    "E:",
    "E1:",
    "E2:",
    "E3:",
    "F:",
    "G:",
    "per-split blends, exhaustive and partial",
    "a file without samples",
    "first and last documents empty",
    "last epoch apart or not: 155",
    "last epoch apart or not: 160",
    "last epoch apart or not: 230",
    "empty test split",
    "weight 0 first",
    "surplus 0",
    "several sequences",
    "no documents in",
    "documents without tokens",
]
OTHERS = ["A:", "C:", "D:", "E2:", "F:", "renormalized weights", "weight 0 first", "weights .1 .2 .7"]
RANDOM_NEWEST, RANDOM_OTHERS = 14, 4


def small(case):
    documents = sum(s["documents"] for s in case["files"].values())
    return len(case["files"]) <= 5 and documents <= 6000 and sum(n or 0 for n in case["sizes"]) <= 30_000


def chosen(version):
    newest = version in ("0.16.1", "0.19.2")
    names, count = (NEWEST, RANDOM_NEWEST) if newest else (OTHERS, RANDOM_OTHERS)
    out = [cases.restrict(c, version) for c in cases.edge_cases() if any(c["name"].startswith(n) for n in names)]
    for i in range(200):
        case = cases.random_case(i, version)
        if count and small(case):
            out.append(case)
            count -= 1
    different = {
        json.dumps({**c, "name": ""}, sort_keys=True): c for c in reversed(out)
    }  # a release without a setting makes some cases equal
    return [c for c in out if c in different.values()]


def digests(cache):
    """Returns the MD5s of a cache's data files by the prefix of their names."""
    out = collections.defaultdict(list)
    for name in compare.data(cache):
        text = pathlib.Path(cache, name).read_bytes()
        md5 = hashlib.md5(text).hexdigest()
        # Releases up to 0.6 have no split in the names. In all releases the prefix ends at the last
        # "-".
        beginning, kind = name.rsplit("-", 1)
        if kind == "description.txt":
            assert name.startswith(md5), name
        else:
            out[beginning].append(md5)
    return dict(sorted(out.items()))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--environments", type=pathlib.Path, required=True)
    ap.add_argument("--versions", nargs="*", default=list(cases.PROFILES))
    args = ap.parse_args()
    for version in args.versions:
        with tempfile.TemporaryDirectory() as tmp:
            jobs = []
            for i, case in enumerate(chosen(version)):
                root = f"{tmp}/{i}/data"
                os.makedirs(root)
                cases.write_inputs(case, root)
                jobs.append({"case": case, "root": root, "cache": f"{tmp}/{i}/cache"})
            ran = compare.original(args.environments, version, jobs, tmp)
            # Releases 0.7 to 0.10 refuse some blends after writing all files. Random cases are only
            # used if the original succeeds.
            lines = [
                json.dumps(
                    {"case": job["case"], "files": digests(job["cache"]) if result["status"] == "wrote" else None},
                    separators=(",", ":"),
                )
                for job, result in zip(jobs, ran["results"])
                if result["status"] == "wrote" or not job["case"]["name"].startswith("random")
            ]
        path = here / "golden" / f"megatron-{version}.json"
        path.write_text(
            '{"script":"conformance/golden.py","versions":%s,"profile":"%s","arithmetic":"%s","cases":[\n%s\n]}\n'
            % (json.dumps(ran["versions"]), cases.PROFILES[version], cases.arithmetic(version), ",\n".join(lines))
        )
        written = sum(json.loads(line)["files"] is not None for line in lines)
        print(f"{path.name}: {len(lines)} cases, {written} written, {path.stat().st_size} bytes")
    if args.versions == list(cases.PROFILES):
        olmo.golden(args.environments, here / "golden" / "olmo.json")


if __name__ == "__main__":
    main()
