"""Fixtures: the program mula, from the variable MULA or built here, and small plans."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest

CLIENT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CLIENT))
MINUTE = 60 * 5  # longer, because the machine may be busy


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints one line with the missing packages and the number of skipped tests or files for each.
    """
    missing: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if found := re.search(r"could not import '([\w.]+)'", reason):
            missing[found[1]] = missing.get(found[1], 0) + 1
    if missing:
        terminalreporter.write_line(
            "skipped, package missing: " + ", ".join(f"{name} ({n})" for name, n in sorted(missing.items()))
        )


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> str:
    """The program mula. The client finds it by the variable MULA."""
    if "MULA" not in os.environ:
        if shutil.which("go") is None:
            pytest.fail("set MULA to the program, or install Go to have it built")
        built = tmp_path_factory.mktemp("bin") / "mula"
        subprocess.run(["go", "build", "-o", built, "./cli/mula"], cwd=CLIENT.parent.parent, check=True)
        os.environ["MULA"] = str(built)
    return os.environ["MULA"]


def write_shard(prefix: Path, documents: list[np.ndarray]) -> None:
    """Writes documents in the format of Megatron-LM: docs/formats/shard.md."""
    code = {2: 8, 4: 4}[documents[0].dtype.itemsize]
    lengths = np.array([len(d) for d in documents], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * documents[0].dtype.itemsize
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1))
        for array in (lengths, offsets.astype(np.int64), np.arange(len(documents) + 1, dtype=np.int64)):
            f.write(array.tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(d.tobytes() for d in documents))


class Made:
    """A plan of the sources web (weight 3) and code (weight 1), and the tokens of its shards."""

    def __init__(
        self,
        folder: Path,
        program: str,
        samples: int = 3000,
        length: int = 16,
        dtype=np.uint16,
        more: str = "",
        vocabulary: int = 1000,
    ):
        draw = np.random.default_rng(7)
        self.length, self.samples, self.folder = length, samples, folder
        self.tokens: dict[tuple[str, int], np.ndarray] = {}
        self.documents: dict[tuple[str, int], list[int]] = {}
        for source, shards in (("web", 2), ("code", 1)):
            for shard in range(shards):
                # Each token depends on the previous one, so that a model can learn something.
                documents = []
                total = 0
                while total < length * samples // 2:
                    n = int(draw.integers(1, 4 * length))
                    documents.append(((np.arange(n) * 7 + draw.integers(vocabulary)) % vocabulary).astype(dtype))
                    total += n
                write_shard(folder / f"{source}{shard}", documents)
                self.tokens[source, shard] = np.concatenate(documents)
                self.documents[source, shard] = [0, *np.cumsum([len(d) for d in documents])]
        (folder / "blend.yaml").write_text(
            f"sequence_length: {length}\nseed: 5\nsamples: {samples}\n{more}"
            "sources:\n- {name: web, shards: [web0.idx, web1.idx], weight: 3}\n"
            "- {name: code, shards: [code0.idx], weight: 1}\n"
        )
        self.path = folder / "plan.json"
        subprocess.run(
            [program, "blend", "--config", folder / "blend.yaml", "--output", self.path],
            check=True,
            capture_output=True,
        )

    def peek(self, position: int, program: str) -> dict:
        """The output of `mula peek` for a position."""
        return json.loads(
            subprocess.run(
                [program, "peek", "--plan", self.path, "--position", str(position), "--json"],
                check=True,
                capture_output=True,
            ).stdout
        )[0]


@pytest.fixture(scope="session")
def made(program, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("plan"), program)


@pytest.fixture(scope="session")
def wide(program, tmp_path_factory) -> Made:
    """With int32 tokens, positions 64 to 100 skipped."""
    return Made(
        tmp_path_factory.mktemp("wide"), program, samples=200, dtype=np.int32, more="skips:\n- {from: 64, to: 100}\n"
    )


@pytest.fixture(scope="session")
def packed(program, tmp_path_factory) -> Made:
    """Complete documents and padding."""
    return Made(tmp_path_factory.mktemp("packed"), program, samples=400, more="packing: best_fit\npad: 999\n")


@pytest.fixture(params=["shared memory", "socket"])
def way(request, monkeypatch) -> str:
    """How records are transferred. A test runs with both. Only Linux has shared memory."""
    import mula

    monkeypatch.setattr(
        mula.Stream, "__init__", partialmethod(mula.Stream.__init__, share=request.param == "shared memory")
    )
    return request.param if sys.platform == "linux" else "socket"


class Running:
    """A `mula serve` on a socket and a port. The test may stop and restart it."""

    def __init__(self, program: str, plan: Path, socket: Path, *flags: str):
        self._command = [program, "serve", "--plan", plan, "--listen", "127.0.0.1:0", "--socket", socket, *flags]
        self.address = f"unix:{socket}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.said = json.loads(line)

    def stop(self, signal: int | None = None) -> None:
        if signal is None:
            self.process.terminate()
        else:
            self.process.send_signal(signal)
        self.process.wait(MINUTE)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def serve(program, tmp_path_factory):
    """Starts servers: serve(plan, *flags)."""
    running = []
    folder = tmp_path_factory.mktemp("s")

    def start(plan: Path, *flags: str) -> Running:
        running.append(Running(program, plan, folder / f"{len(running)}", *flags))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.stop()
