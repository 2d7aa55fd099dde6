"""Makes blends.json: the MD5s of the arrays that Megatron-LM's own helper returns for some blends.

Run with a Python that has megatron-core and pybind11, and a C++ compiler: python blends.py. The
separate arithmetic uses the helper as compiled with the installation of megatron-core. For the
fused arithmetic, the script compiles the helper's source again, with its flags and FMA.
"""

import hashlib
import importlib.util
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import numpy
import pybind11
from megatron.core import __version__ as megatron_version
from megatron.core.datasets import helpers_cpp


def fused_helper():
    source = Path(helpers_cpp.__file__).with_name("helpers.cpp")
    target = Path(tempfile.mkdtemp()) / ("helpers_cpp" + sysconfig.get_config_var("EXT_SUFFIX"))
    subprocess.run(
        [
            "g++",
            "-O3",
            "-Wall",
            "-shared",
            "-std=c++17",
            "-fPIC",
            "-march=x86-64-v3",
            "-I" + sysconfig.get_path("include"),
            "-I" + pybind11.get_include(),
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    spec = importlib.util.spec_from_file_location("helpers_cpp", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raw(kind, n):
    """Returns n numbers of a kind, the same as greedy_golden_test.go."""
    out, state = [], 12345
    for i in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        draw = state >> 33
        out.append(
            {
                "uniform": draw % 100000 + 1,
                "cubes": (draw % 300 + 1) ** 3,
                "powers": 1 << (draw % 20),
                "five": draw % 5 + 1,
                "equal": 1,
                "zeros": draw % 3 * (draw % 1000),
                "sources": [60, 15, 10, 6, 5, 3, 1][i * 7 // n],
            }[kind]
        )
    return out


def answer(helper, kind, datasets, samples):
    values = raw(kind, datasets)
    if samples is None:
        sizes = numpy.array(values, dtype=numpy.int64)
        samples = int(sizes.sum())
        dataset, sample = numpy.zeros(samples, dtype=numpy.int16), numpy.zeros(samples, dtype=numpy.int64)
        helper.build_exhaustive_blending_indices(dataset, sample, sizes, datasets)
    else:
        total = float(sum(values))
        weights = numpy.array([v / total for v in values], dtype=numpy.float64)
        dataset, sample = numpy.zeros(samples, dtype=numpy.int16), numpy.zeros(samples, dtype=numpy.int64)
        helper.build_blending_indices(dataset, sample, weights, datasets, samples, False)
    return hashlib.md5(dataset.tobytes()).hexdigest(), hashlib.md5(sample.tobytes()).hexdigest(), samples


weighted = [
    ("uniform", 2, 300_000),
    ("uniform", 3, 300_000),
    ("cubes", 7, 1_000_000),
    ("five", 8, 200_000),
    ("zeros", 9, 200_000),
    ("powers", 20, 300_000),
    ("uniform", 33, 300_000),
    ("cubes", 100, 500_000),
    ("equal", 300, 100_000),
    ("five", 500, 100_000),
    ("powers", 600, 100_000),
    ("cubes", 1000, 300_000),
    ("sources", 2000, 100_000),
    ("uniform", 2000, 500_000),
    ("uniform", 5000, 100_000),
]
exhaustive = [
    ("uniform", 3),
    ("uniform", 7),
    ("powers", 9),
    ("powers", 12),
    ("uniform", 20),
    ("five", 40),
    ("equal", 500),
    ("five", 3000),
]

cases = []
for fused, helper in ((False, helpers_cpp), (True, fused_helper())):
    for kind, datasets, samples in weighted + [(kind, datasets, None) for kind, datasets in exhaustive]:
        d, s, n = answer(helper, kind, datasets, samples)
        cases.append(
            {
                "kind": kind,
                "datasets": datasets,
                "samples": n,
                "exhaustive": samples is None,
                "fused": fused,
                "dataset": d,
                "sample": s,
            }
        )

made = {
    "megatron-core": megatron_version,
    "numpy": numpy.__version__,
    "python": platform.python_version(),
    "machine": platform.machine(),
}
Path(__file__).with_suffix(".json").write_text(json.dumps({"made by": made, "cases": cases}, indent=1) + "\n")
