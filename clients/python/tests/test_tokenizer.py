"""mula.Tokenizer: ids equal Hugging Face's, and results stay valid.

Every failure is an error of one sentence.
"""

import gc
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import CLIENT, MINUTE

import mula
import mula.tokenizer

TESTDATA = CLIENT.parent.parent / "tokenize" / "testdata"
OLMO = TESTDATA / "olmo.json"


@pytest.fixture(autouse=True)
def with_program(program) -> None:
    """The client finds the program."""


@pytest.fixture(scope="module")
def text() -> str:
    return (TESTDATA / "text.txt").read_text()


def lists(batch: mula.EncodedBatch) -> list[list[int]]:
    return [ids.tolist() for ids in batch]


def process_of(tokenizer: mula.Tokenizer) -> int:
    return tokenizer._process._process.pid


# ---- ids


@pytest.mark.parametrize("specials", ["text", "tokens"])
@pytest.mark.parametrize("name", ["gpt2", "cl100k", "olmo"])
def test_golden_ids(name, specials):
    """The committed ids of Hugging Face tokenizers, from strings and from Arrow arrays."""
    golden = json.loads((TESTDATA / "golden.json").read_text())
    texts = golden["documents"]
    want = [
        ids if ids is not None else plain
        for ids, plain in zip(golden["ids"][f"{name}.{specials}"], golden["ids"][f"{name}.text"])
    ]
    with mula.Tokenizer(TESTDATA / f"{name}.json", specials=specials, threads=2) as t:
        batch = t.encode_batch(texts)
        assert lists(batch) == want
        assert batch.ids.dtype == np.uint32 and batch.offsets.dtype == np.int64 and batch.offsets[0] == 0
        assert batch.to_arrow().to_pylist() == want
        assert [t.encode(one).tolist() for one in texts[:20]] == want[:20]
        if name != "olmo":  # its NFC changes texts
            assert [t.decode(ids) for ids in batch] == texts
        kinds = [pa.string(), pa.large_string(), *([pa.string_view()] if hasattr(pa, "string_view") else [])]
        for kind in kinds:
            array = pa.array(["before", *texts, "after"], kind)[1:-1]  # with an offset
            assert lists(t.encode_batch(array)) == want
        parts = pa.chunked_array([texts[:5], [], texts[5:]], pa.string())
        assert lists(t.encode_batch(parts)) == want
        assert lists(t.encode_batch(pa.array(texts).dictionary_encode())) == want
        assert lists(t.encode_batch(iter(texts))) == want


def test_golden_pipelines(tmp_path):
    """Other kinds of tokenizers, with special tokens around the texts."""
    golden = json.loads((TESTDATA / "pipelines.json").read_text())
    texts, names = golden["documents"], {"llama3", "llama2", "bert uncased", "xlm-r"}
    cases = [case for case in golden["cases"] if case["name"] in names]
    assert len(cases) == len(names)
    for case in cases:
        keys = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
        file = {"version": "1.0", "truncation": None, "padding": None, "model": golden["models"][case["model"]]}
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(file | {key: case[key] for key in keys}))
        with mula.Tokenizer(path) as t:
            assert lists(t.encode_batch(texts)) == case["plain"]
        around = [ids if ids is not None else plain for ids, plain in zip(case["around"], case["plain"])]
        with mula.Tokenizer(path, specials="tokens", add_special_tokens=True) as t:
            assert lists(t.encode_batch(texts)) == around
            for text, ids, decoded in zip(texts, around, case["decoded"]):
                assert t.decode(ids) == (text if decoded is None else decoded)


def test_equal_to_hugging_face(text):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(str(OLMO))
    texts = [text[i : i + 500] + "<|endoftext|>" for i in range(0, len(text), 500)]
    for specials in ("tokens", "text"):
        theirs.encode_special_tokens = specials == "text"
        with mula.Tokenizer(OLMO, specials=specials) as t:
            assert lists(t.encode_batch(texts)) == [e.ids for e in theirs.encode_batch(texts)]
            assert t.vocab_size == theirs.get_vocab_size()


def test_empty_batches_and_texts():
    with mula.Tokenizer(OLMO) as t:
        for nothing in ([], (), pa.array([], pa.string()), pa.chunked_array([], pa.string()), iter([])):
            batch = t.encode_batch(nothing)
            assert (len(batch), batch.ids.tolist(), batch.offsets.tolist()) == (0, [], [0])
            assert batch.to_arrow().to_pylist() == []
        assert lists(t.encode_batch([""])) == [[]]
        assert lists(t.encode_batch([""] * 200_000)) == [[]] * 200_000  # several parts
        assert t.encode("").tolist() == [] and t.decode([]) == "" and t.decode(np.empty(0)) == ""
        batch = t.encode_batch(["", "the text", ""])
        assert batch[-2].tolist() == batch[1].tolist() == t.encode("the text").tolist()
        with pytest.raises(IndexError):
            batch[3]
        with mula.Tokenizer(OLMO, specials="tokens") as other:
            assert other.decode(other.encode("a<|endoftext|>")) == "a<|endoftext|>"
        assert t.decode(t.encode("漢")[:1]) == "\ufffd"


def test_a_batch_of_100_megabytes(text):
    """One text of 20 MB and many small ones: the ids equal the ids of small batches."""
    rng = np.random.default_rng(3)
    texts = [text * (20_000_000 // len(text))]
    size = len(texts[0].encode())
    while size < 100_000_000:
        start = int(rng.integers(len(text) - 1000))
        texts.append(text[start : start + int(rng.integers(1000))] * 100)
        size += len(texts[-1].encode())
    with mula.Tokenizer(OLMO) as t:
        batch = t.encode_batch(texts)
        assert len(batch) == len(texts)
        for i in (*range(1, len(texts), 50), len(texts) - 1):
            assert batch[i].tolist() == t.encode(texts[i]).tolist()
        alone = t.encode(texts[0])
        assert (alone == batch[0]).all()
        arrow = batch.to_arrow()
        assert arrow.buffers()[1].address == batch.offsets.ctypes.data
        assert arrow.values.buffers()[1].address == batch.ids.ctypes.data
        arrow.validate(full=True)
        # The memory of the large text is not kept.
        assert all(os.fstat(slot).st_size <= mula.tokenizer.KEPT_SLOT for slot in t._process._slots)


def test_threads_do_not_change_ids(text):
    texts = [text[i : i + 777] for i in range(0, len(text), 777)] * 40
    results = []
    for threads in (1, 2, 5, None):
        with mula.Tokenizer(OLMO, threads=threads) as t:
            results.append(t.encode_batch(texts))
    for result in results[1:]:
        assert (result.ids == results[0].ids).all() and (result.offsets == results[0].offsets).all()


# ---- results


def test_results_stay_valid(text):
    """Results that are kept do not change, also after later batches, `close` and a kill."""
    t = mula.Tokenizer(OLMO)
    texts = [text * 50]
    kept, views = [], []
    for i in range(5):
        batch = t.encode_batch([str(i), *texts])
        assert batch.ids.flags.writeable and batch.ids.nbytes > mula.tokenizer.SMALL
        kept.append((batch, batch.ids.copy()))
        views.append((batch.ids[5:][::2], batch.ids[5::2].copy()))  # views of views
        views.append((batch.to_arrow(), batch.to_arrow().to_pylist()))
        views.append((memoryview(batch.ids), batch.ids.tolist()))
    del kept[::2], batch
    gc.collect()
    for _ in range(3):
        t.encode_batch(texts)
    os.kill(process_of(t), signal.SIGKILL)
    with pytest.raises(mula.Error):
        t.encode_batch(texts)
    t.encode_batch(texts)
    t.close()
    for batch, ids in kept:
        assert (batch.ids == ids).all()
    for view, want in views:
        assert (view.to_pylist() if isinstance(view, pa.Array) else view.tolist()) == (
            want if isinstance(want, list) else want.tolist()
        )


def test_files_are_used_again(text):
    """A dropped result's file serves the next batch, and the number of open files is bounded."""
    texts = [text * 50]
    with mula.Tokenizer(OLMO) as t:
        address = t.encode_batch(texts).ids.ctypes.data
        for _ in range(3):
            assert t.encode_batch(texts).ids.ctypes.data == address
        before = len(os.listdir("/dev/fd"))
        first = t.encode_batch(texts).ids
        kept = [t.encode_batch(texts) for _ in range(mula.tokenizer.HELD + 20)]
        assert len(os.listdir("/dev/fd")) <= before + 2 * mula.tokenizer.HELD + 2
        assert all((batch.ids == first).all() for batch in kept)
        del kept, first
        gc.collect()
        t.encode_batch(texts)
        assert len(os.listdir("/dev/fd")) <= before + 2 * mula.tokenizer.IDLE + 2
        # A small result does not hold the file of a large one, and the file shrinks.
        t.encode_batch([text * 250])
        small = t.encode_batch([text] * 5)
        large = t.encode_batch([text * 40])
        assert small.ids.base is None and large.ids.base is not None
        result = next(iter(t._held))
        assert os.fstat(result.descriptor).st_size <= 4 * (large.ids.nbytes + 64)


# ---- errors


def test_texts_that_fail(text, tmp_path):
    with mula.Tokenizer(OLMO, threads=3) as t:
        first = process_of(t)
        good = t.encode("the text").tolist()

        def fails(texts, message):
            with pytest.raises(mula.Error, match=message) as e:
                t.encode_batch(texts)
            assert "\n" not in str(e.value)
            assert t.encode("the text").tolist() == good

        fails(["a", "b\ud800c"], r"text 1: character 1 is half a surrogate pair.*errors='replace'")
        fails([text] * 300 + ["\udfff"] + ["\ud800"], "text 300: character 0")
        fails(["a", None], "text 1: want str, not NoneType")
        fails([b"bytes"], "text 0: want str, not bytes")
        fails(["a"] * 100_000 + [["a"]], "text 100000: want str, not list")
        fails("a text", "texts is one str: want a list of str")
        fails(pa.array(["a", None]), r"text 1 is null; .*fill_null")
        fails(pa.array([1, 2]), "an Arrow array of int64: want strings")
        fails(pa.array([b"a"]), "an Arrow array of binary: want strings")
        bad = pa.Array.from_buffers(
            pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"aa\xffb")]
        )
        fails(bad, "text 1: invalid UTF-8 at byte 1")
        fails(pa.chunked_array([pa.array([text] * 200), bad]), "text 201: invalid UTF-8 at byte 1")
        with pytest.raises(mula.Error, match="a text is list: want str"):
            t.encode(["a"])
        for ids, message in (
            ([5000], "id 5000 at index 0 is not in the vocabulary of 667 tokens"),
            ([-1], "ids from -1 to -1: want ids from 0 to 666"),
            ([1 << 32], "want ids from 0 to 666"),
            ([1.5], "want a list of whole numbers"),
            ([[1]], "2 dimensions: want a list"),
        ):
            with pytest.raises(mula.Error, match=message):
                t.decode(ids)
        assert process_of(t) == first, "none of these errors ends the process"
    # A vocabulary without the byte of "z", and without an unknown token.
    file = json.loads(OLMO.read_text())
    model = file["model"]
    model["vocab"] = {"zzzz" if token == "z" else token: i for token, i in model["vocab"].items()}
    model["merges"] = [m for m in model["merges"] if "z" not in m]
    (tmp_path / "no_z.json").write_text(json.dumps(file))
    with mula.Tokenizer(tmp_path / "no_z.json") as t:
        with pytest.raises(mula.Error, match='text 2: byte 0x7a in "z" has no token in the vocabulary'):
            t.encode_batch(["a", "b", "z"])
        assert len(t.encode("a")) == 1


def test_arguments(tmp_path, monkeypatch):
    for arguments, message in (
        ({"path": tmp_path / "absent.json"}, "reading tokenizer: open .*absent.json: no such file"),
        ({"path": CLIENT / "pyproject.toml"}, "pyproject.toml: "),
        ({"threads": 0}, "threads=0: want 1 to 4096"),
        ({"threads": 1.5}, "threads=1.5: want a whole number"),
        ({"specials": "both"}, 'specials=.both.: want "text" or "tokens"'),
        ({"mula": tmp_path / "none"}, "there is no program .*none; build it"),
        ({"mula": "true"}, "`/.*true tokenizer serve` ended: exit code 0"),
    ):
        with pytest.raises(mula.Error, match=message) as e:
            mula.Tokenizer(**({"path": OLMO} | arguments))
        assert "\n" not in str(e.value)
    monkeypatch.setenv("MULA", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(mula.Error, match="there is no program mula"):
        mula.Tokenizer(OLMO)


def test_truncation_is_refused(tmp_path):
    file = json.loads(OLMO.read_text())
    file["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(file))
    with pytest.raises(mula.Error, match="truncat"):
        mula.Tokenizer(path)
    with mula.Tokenizer(path, ignore_truncation_and_padding=True) as t:
        assert len(t.encode("It's a  text")) == 10


def test_program_is_killed(text):
    """A kill before and during a batch is an error, and the next call starts a new process."""
    with mula.Tokenizer(OLMO, threads=1) as t:
        want = t.encode("the text").tolist()
        first = process_of(t)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(mula.Error, match="tokenizer serve` ended: signal 9 killed it, perhaps for lack of memory"):
            t.encode("the text")
        assert t.encode("the text").tolist() == want and process_of(t) != first
        texts = [text * 200] * 4
        for delay in (0.05, 0.2):
            timer = threading.Timer(delay, os.kill, (process_of(t), signal.SIGKILL))
            timer.start()
            with pytest.raises(mula.Error, match="signal 9 killed it"):
                while True:
                    t.encode_batch(texts)
            timer.join()
            assert t.encode("the text").tolist() == want
        os.kill(process_of(t), signal.SIGKILL)
        with pytest.raises(mula.Error, match="signal 9"):
            t.decode([1])
    with pytest.raises(mula.Error, match="the tokenizer is closed"):
        t.encode("the text")
    t.close()


def test_changed_file(tmp_path):
    """A new process does not use another tokenizer than the first."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(OLMO.read_bytes())
    t = mula.Tokenizer(path)
    copy = pickle.dumps(t)
    path.write_bytes((TESTDATA / "gpt2.json").read_bytes())
    os.kill(process_of(t), signal.SIGKILL)
    with pytest.raises(mula.Error, match="signal 9"):
        t.encode("the text")
    with pytest.raises(mula.Error, match="has changed since the tokenizer was made"):
        t.encode("the text")
    with pytest.raises(mula.Error, match="differs from the file of the pickled tokenizer"):
        pickle.loads(copy)


def test_interrupt(text):
    """Ctrl-C in a long batch leaves a usable tokenizer."""
    # A process that a shell has started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mula.Tokenizer(OLMO, threads=1) as t:
            want = t.encode("the text").tolist()
            timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    t.encode_batch([text * 200] * 4)
            timer.join()
            assert t.encode("the text").tolist() == want
    finally:
        signal.signal(signal.SIGINT, before)


# ---- processes and threads


def test_threads_share_a_tokenizer(text):
    with mula.Tokenizer(OLMO, threads=2) as t:
        texts = [[text[100 * i :] * (1 + 5 * i), str(i)] for i in range(8)]
        want = [lists(t.encode_batch(one)) for one in texts]
        failed = []

        def work(i):
            for n in range(10):
                if lists(t.encode_batch(texts[(i + n) % 8])) != want[(i + n) % 8]:
                    failed.append((i, n))
                if n % 4 == i % 4:
                    try:
                        t.encode_batch(["a", "\ud800"])
                        failed.append((i, n))
                    except mula.Error:
                        pass

        threads = [threading.Thread(target=work, args=[i]) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def ids_of(tokenizer: mula.Tokenizer, text: str) -> tuple[list[int], int]:
    return tokenizer.encode(text).tolist(), process_of(tokenizer)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method, program):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    with mula.Tokenizer(OLMO, threads=1) as t:
        want, here = ids_of(t, "the text")
        with multiprocessing.get_context(method).Pool(2) as pool:
            for ids, there in pool.starmap(ids_of, [(t, "the text")] * 8):
                assert ids == want and there != here
        assert ids_of(t, "the text") == (want, here)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_fork(text):
    """A forked process uses the tokenizer that it inherits, and inherited results do not change."""
    with mula.Tokenizer(OLMO, threads=1) as t:
        inherited = t.encode_batch([text * 50])
        want = inherited.ids.copy()
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.read(here, 1)  # the parent has dropped its result and encoded others
                right = (inherited.ids == want).all() and (t.encode_batch([text * 50]).ids == want).all()
                status = 0 if right else 2
            finally:
                os._exit(status)
        del inherited
        for i in range(3):
            t.encode_batch([f"another {i} " + text * 50])
        os.write(there, b"x")
        assert os.waitpid(child, 0)[1] == 0
        assert (t.encode_batch([text * 50]).ids == want).all()
        os.close(here)
        os.close(there)


def test_no_process_is_left():
    """The process ends with the last reference, and with the Python process, also by SIGKILL."""
    t = mula.Tokenizer(OLMO)
    process = t._process._process
    del t
    gc.collect()
    assert process.returncode is not None
    script = (
        f"import sys, time; sys.path.insert(0, {str(CLIENT)!r}); import mula; t = mula.Tokenizer({str(OLMO)!r}); "
        "print(t._process._process.pid, flush=True); time.sleep(sys.maxsize) if sys.argv[1] == 'wait' else None"
    )
    for end in ("wait", "exit"):
        python = subprocess.Popen([sys.executable, "-c", script, end], stdout=subprocess.PIPE, text=True)
        started = int(python.stdout.readline())
        if end == "wait":
            python.kill()
        python.wait(MINUTE)
        python.stdout.close()
        until = time.monotonic() + MINUTE
        while running(started):
            assert time.monotonic() < until, "the process is still running"
            time.sleep(0.01)


def running(process: int) -> bool:
    """Whether a process runs. A process that no parent has waited for does not."""
    try:
        return not re.search(r"^State:\s+Z", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except FileNotFoundError:
        if sys.platform == "linux":
            return False
    try:
        os.kill(process, 0)
        return True
    except ProcessLookupError:
        return False


def test_without_memfd(text, monkeypatch, tmp_path):
    """Systems without memfd_create use files that have no name any more."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with mula.Tokenizer(OLMO) as t:
        batch = t.encode_batch([text * 50])
        assert os.listdir(tmp_path) == []
        assert t.decode(batch.ids[:100]) == t.decode(batch.ids.tolist()[:100])
        assert (t.encode(text * 50) == batch.ids).all()
