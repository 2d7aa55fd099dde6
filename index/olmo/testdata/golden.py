#!/usr/bin/env python3
"""Makes golden.json: what ai2-olmo-core itself computes, for the tests of this package.

Needs ai2-olmo-core, torch and numpy; run as  golden.py > golden.json
"""

import hashlib, importlib.metadata, json, os, pathlib, random, sys, tempfile, warnings

warnings.simplefilter("ignore")
import numpy, torch
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
from olmo_core.data.composable.sampling_instance_source import SamplingInstanceSource
from olmo_core.data.composable.instance_source import InstanceSource
from olmo_core.data.composable.utils import calculate_sample_sizes
from olmo_core.data.source_mixture import SourceMixtureConfig, SourceMixtureDatasetConfig, SourceMixtureList

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
    """A file of so many bytes that takes no space."""
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
        # The instances at the beginning of each file, as the data set itself counts them.
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


def mixtures(folder):
    out = []
    for k in range(50):
        length = rng.choice([1, 16, 100])
        batch = length * rng.choice([1, 4, 32])
        names = [f"s{i}" for i in range(rng.randint(1, 6))]
        weights = [rng.choice([1, 1, rng.random(), rng.random() ** 4 + 1e-4]) for _ in names]
        total = sum(weights)
        sources = []
        for i, (name, w) in enumerate(zip(names, weights)):
            tokens = [
                rng.choice([0, 1, length, rng.randint(1, 3 * length), rng.randint(1, 5000), rng.randint(1, 200000)])
                for _ in range(rng.randint(1, 7))
            ]
            sources.append(
                dict(
                    name=name,
                    ratio=w / total,
                    fraction=rng.choice([1, 1, rng.uniform(0.3, 1)]),
                    repetition=rng.choice([1, 1, 2.5, rng.uniform(1, 8), 50]),
                    tokens=tokens,
                )
            )
        most = min(sum(s["tokens"]) * s["fraction"] * s["repetition"] / s["ratio"] for s in sources)
        requested = max(1, int(most * rng.choice([1, 0.999, rng.random(), rng.random(), 1.01])))
        config = SourceMixtureDatasetConfig(
            source_list=SourceMixtureList(
                sources=[
                    SourceMixtureConfig(
                        source_name=s["name"],
                        target_ratio=s["ratio"],
                        max_source_fraction=s["fraction"],
                        max_repetition_ratio=s["repetition"],
                        paths=[empty_file(folder / f"m{k}-{i}-{f}.npy", 2 * n) for f, n in enumerate(s["tokens"])],
                    )
                    for i, s in enumerate(sources)
                ]
            ),
            requested_tokens=requested,
            global_batch_size=batch,
            processes=1,
            seed=1,
            render_tables=False,
            quiet=True,
        )
        try:
            mixture = config.build(npdtype=numpy.uint16, sequence_length=length)
            parts = []
            for path, tokens in zip(mixture.to_paths(), mixture.to_index().values()):
                _, i, f = pathlib.Path(path).stem.split("-")
                parts.append([int(i), int(f), tokens])
        except Exception as e:
            parts = None
            print(f"mixture {k}: {type(e).__name__}: {e}", file=sys.stderr)
        out.append(dict(sources=sources, requested=requested, batch=batch, length=length, parts=parts))
    return out


def sample_sizes():
    out = []
    for k in range(70):
        n = rng.randint(1, 12)
        ratios = [rng.choice([1.0, rng.random() + 1e-9, rng.random() ** 6 + 1e-6]) for _ in range(n)]
        if k % 3:
            ratios = [r / sum(ratios) for r in ratios]
        if k % 3 == 2:
            ratios[0] += rng.choice([0, 1e-6, 9e-6, 2e-5])
        sizes = [rng.choice([rng.randint(1, 100), rng.randint(1, 10**6), rng.randint(10**9, 10**13)]) for _ in range(n)]
        repetitions = [rng.choice([1.0, 1.5, rng.uniform(1, 10)]) for _ in range(n)]
        target = rng.choice([None, None, sum(sizes), max(1, int(sum(sizes) * rng.random() ** 3)), rng.randint(1, 1000)])
        try:
            result = [int(v) for v in calculate_sample_sizes(sizes, ratios, repetitions, target_size=target)]
        except Exception as e:
            result = None
        out.append(
            dict(
                sources=[dict(tokens=s, ratio=r, repetition=m) for s, r, m in zip(sizes, ratios, repetitions)],
                target=target or 0,
                sizes=result,
            )
        )
    return out


class Numbers(InstanceSource):
    """A source that has a number of instances and nothing else."""

    def __init__(self, n, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        raise NotImplementedError

    @property
    def fingerprint(self):
        return f"numbers{self.n}"

    def children(self):
        return []


def samples(folder):
    out = []
    for k in range(24):
        length = 16
        n = rng.randint(1, 300)
        tokens = rng.randint(length, 5 * n * length)
        seed = rng.randint(0, 2**33)
        work = folder / f"samples-{k}"
        kwargs = dict(work_dir=work, sequence_length=length, max_sequence_length=length)
        source = SamplingInstanceSource(Numbers(n, **kwargs), max_tokens=tokens, work_dir=work, seed=seed)
        ids = numpy.fromfile(source._source_sample_paths[0], dtype="<u4")
        assert len(ids) == len(source)
        out.append(
            dict(
                instances=n,
                length=length,
                tokens=tokens,
                seed=seed,
                sampled=len(ids),
                md5=hashlib.md5(ids.tobytes()).hexdigest(),
                first=ids[:8].tolist(),
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
        mixtures=mixtures(folder),
        sample_sizes=sample_sizes(),
        samples=samples(folder),
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
