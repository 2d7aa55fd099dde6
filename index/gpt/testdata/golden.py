"""Writes golden.json: MD5 sums of the files of Megatron-LM's GPTDataset for artificial lengths.

Run with megatron-core, numpy and torch installed:  python3 golden.py > golden.json
The last case needs 1 GB of disk in the directory for temporary files and 2 GB of memory.
"""

import hashlib, json, os, struct, sys, tempfile
import numpy, torch
import megatron.core
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split


def lengths(n, seed, modulus, zeros):
    """Returns length i from a 31-bit hash of i.

    It is the hash modulo `modulus`, or 0 if the hash modulo 16 is below `zeros`.
    """
    h = (
        numpy.arange(1, n + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(seed)
    ) >> numpy.uint64(33)
    a = (h % numpy.uint64(modulus)).astype(numpy.int32)
    a[h % numpy.uint64(16) < zeros] = 0
    return a


class Tokenizer:
    unique_identifiers = {"class": "none"}
    vocab_size, pad, eod, special_tokens_dict = 1000, 0, 0, {}


def build(
    directory, sequences, seed, modulus, zeros, first, end, sequence_length, extra, partial, samples, random_seed
):
    a = lengths(sequences, seed, modulus, zeros)
    prefix = os.path.join(directory, "d")
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(a), len(a) + 1))
        f.write(a.tobytes())
        f.write((2 * (numpy.cumsum(a, dtype=numpy.int64) - a)).tobytes())
        f.write(numpy.arange(len(a) + 1, dtype=numpy.int64).tobytes())
    with open(prefix + ".bin", "wb") as f:
        f.write(b"\0" * 64)  # the tokens are not read
    config = GPTDatasetConfig(
        random_seed=random_seed,
        sequence_length=sequence_length,
        path_to_cache=os.path.join(directory, "cache"),
        split="1,0,0",
        blend=([prefix], None),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=not partial,
    )
    split = Split.valid if partial else Split.train
    case = dict(
        sequences=sequences,
        length_seed=seed,
        modulus=modulus,
        zeros=zeros,
        first=first,
        end=end,
        sequence_length=sequence_length,
        extra=extra,
        partial=partial,
        samples=-1 if samples is None else samples,
        seed=random_seed,
    )
    try:
        d = GPTDataset(
            IndexedDataset(prefix, multimodal=False, mmap=True),
            prefix,
            numpy.arange(first, end, dtype=numpy.int32),
            samples,
            split,
            config,
        )
    except AssertionError:
        case["fails"] = True
        return case
    for name in "document_index", "sample_index", "shuffle_index":
        path = os.path.join(directory, "cache", f"{d.unique_description_hash}-GPTDataset-{split.name}-{name}.npy")
        with open(path, "rb") as f:
            case[name] = hashlib.file_digest(f, "md5").hexdigest()
    return case


def cases():
    r = numpy.random.RandomState(20261121)
    for k in range(60):
        n = int(r.choice([1, 2, 3, 10, 50, 400, 5000]))
        modulus = int(r.choice([2, 5, 50, 1250, 40000]))
        zeros = int(r.choice([0, 0, 1, 8]))
        seed = int(r.randint(1 << 30))
        first = int(r.randint(n)) if k % 3 == 0 else 0
        end = int(r.randint(first, n)) + 1 if k % 3 == 0 else n
        tokens = int(lengths(n, seed, modulus, zeros)[first:end].sum())
        if tokens <= 1:
            continue
        s = int(r.choice([2, 7, 64, 100, 1024, 4096]))
        s = max(s, tokens // 200000)
        asked = None if k % 4 == 0 else int(float(r.uniform(0, 5)) * tokens / s)
        yield (
            n,
            seed,
            modulus,
            zeros,
            first,
            end,
            s,
            bool(r.randint(2)),
            bool(r.randint(2)),
            asked,
            int(r.randint(1 << 31)),
        )
    # Separate final epochs, just below and at the threshold of 80 %.
    n, seed, modulus, s = 3000, 5, 500, 64
    tokens = int(lengths(n, seed, modulus, 0).sum())
    per, sans = (tokens - 1) // s, (2 * tokens - 1) // s
    for more in int(0.80 * per) - 1, int(0.80 * per):
        yield n, seed, modulus, 0, 0, n, s, True, False, sans + more, 77
    # Counts in single precision that are too large (surplus rows) and too small.
    for wanted, n, s in (1, 65, 67001), (-1, 100, 100003):
        for k in range(1, 10000):
            x, seed = k % 2 == 0, k << 40
            tokens = int(lengths(n, seed, 1 << 31, 0).sum(dtype=numpy.int64)) - x
            count = int(numpy.ceil(numpy.float32(tokens) / numpy.float32(s)))
            if count - -(-tokens // s) == wanted:
                yield n, seed, 1 << 31, 0, 0, n, s, x, True, None, k
                break
    # Long documents, with samples too short for processing in groups.
    yield 9, 4, 100000, 0, 0, 9, 3, False, False, None, 4
    # Enough samples for every shuffle algorithm.
    yield 13000000, 6, 2500, 1, 0, 13000000, 4096, True, False, None, 1234
    yield 6000000, 7, 2500, 1, 0, 6000000, 4096, True, False, 4300000, 1234


out = []
for case in cases():
    with tempfile.TemporaryDirectory() as directory:
        out.append(build(directory, *case))
        print(len(out), file=sys.stderr)
json.dump(
    {"megatron-core": megatron.core.__version__, "numpy": numpy.__version__, "torch": torch.__version__, "cases": out},
    sys.stdout,
    indent=1,
)
print()
