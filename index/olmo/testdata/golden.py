#!/usr/bin/env python3
"""Makes golden.json: results of ai2-olmo-core, for the tests of this package.

Needs ai2-olmo-core, torch and numpy; run as  golden.py > golden.json
"""

import hashlib, importlib.metadata, json, os, pathlib, random, sys, tempfile, warnings

warnings.simplefilter("ignore")
import numpy, torch
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

rng = random.Random(20260821)


def permutations():
    out = []
    for seed in [0, 1, 42, -42, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 6198]:
        for n in [0, 1, 2, 10, 33, 1000]:
            a = list(range(n))
            random.Random(seed).shuffle(a)
            out.append(
                dict(seed=seed, n=n, first=a[:40], md5=hashlib.md5(numpy.array(a, dtype="<u4").tobytes()).hexdigest())
            )
    return out


def empty_file(path, size):
    """Makes a sparse file of a size."""
    with open(path, "wb") as f:
        f.truncate(size)
    return str(path)


def datasets(folder):
    out = []
    for k in range(12):
        dtype = rng.choice(["uint8", "uint16", "uint32", "uint64"])
        size = numpy.dtype(dtype).itemsize
        length = rng.choice([8, 64, 100])
        longest = rng.choice([None, length, 4 * length])
        paths, sizes = [], []
        for f in range(rng.randint(1, 5)):
            tokens = rng.choice([length - 1, rng.randint(0, 50 * length) + 1, rng.randint(1000, 100000)])
            sizes.append(tokens * size)
            paths.append(empty_file(folder / f"part-{k}-{f}.npy", tokens * size))
        sizes[0] += 4 * length * size  # one instance at least
        os.truncate(paths[0], sizes[0])
        vocabulary = dict(
            size=rng.randint(200, 256), pad=rng.choice([0, -1, 255]), eos=rng.randint(0, 199), bos=rng.choice([None, 3])
        )
        seed, epoch = rng.choice([0, 7, 34521, 2**32 - 1, 2**40]), rng.randint(1, 4)
        dataset = NumpyFSLDataset(
            *paths,
            sequence_length=length,
            pad_token_id=vocabulary["pad"],
            eos_token_id=vocabulary["eos"],
            bos_token_id=vocabulary["bos"],
            vocab_size=vocabulary["size"],
            dtype=getattr(numpy, dtype),
            max_target_sequence_length=longest,
        )
        work = folder / f"work-{k}"
        dataset.work_dir = work
        dataset.prepare()
        loader = NumpyFSLDataLoader.wrap_numpy_dataset(
            dataset,
            global_batch_size=length,
            collator=DataCollator(pad_token_id=0),
            work_dir=work,
            seed=seed,
            num_threads=0,
            shuffle=k % 4 != 3,
        )
        loader.reshuffle(epoch=epoch)
        (order,) = work.glob("global_indices*")
        # The first instance of each file, as the dataset counts them.
        out.append(
            dict(
                dtype=dtype,
                length=length,
                longest=longest or 0,
                files=[dict(name=os.path.basename(p), bytes=s) for p, s in zip(paths, sizes)],
                vocabulary=vocabulary,
                seed=seed,
                epoch=epoch,
                shuffle=k % 4 != 3,
                instances=len(dataset),
                offsets=dataset.offsets,
                fingerprint=dataset.fingerprint,
                fingerprint_version=dataset.fingerprint_version,
                name=order.name,
                md5=hashlib.md5(order.read_bytes()).hexdigest(),
                first=numpy.fromfile(order, dtype="<u4")[:8].tolist(),
            )
        )
    return out


with tempfile.TemporaryDirectory() as tmp:
    folder = pathlib.Path(tmp)
    result = dict(
        versions={
            "ai2-olmo-core": importlib.metadata.version("ai2-olmo-core"),
            "numpy": numpy.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        permutations=permutations(),
        datasets=datasets(folder),
    )
print("{")
print(
    ",\n".join(
        f"{json.dumps(key)}: "
        + (
            json.dumps(value)
            if isinstance(value, dict)
            else "[\n" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in value) + "\n]"
        )
        for key, value in result.items()
    )
)
print("}")
