"""Texts of many kinds from local files, and random texts of sequences that tokenizers often get
wrong.

The files are a folder of JSON lines, the Go distribution, message catalogues, manual pages and HTML
pages. conformance/ids.py, benchmarks/encoding.py and the scripts in tokenize/testdata read them.
Each function except nasty returns a list of str in an order that depends only on file names.
"""

import base64, gzip, json, os, pathlib, random, struct, subprocess

# The languages of catalogues and manual pages, with scripts of all kinds, in the order of the mix.
LANGUAGES = [
    "de",
    "fr",
    "es",
    "ru",
    "ja",
    "zh_CN",
    "ko",
    "ar",
    "zh_TW",
    "uk",
    "el",
    "he",
    "th",
    "vi",
    "tr",
    "hi",
    "fa",
    "ka",
    "pl",
    "cs",
    "fi",
    "hu",
    "ta",
    "bn",
]


# Special tokens, contractions, white space, marks and other code points that affect the boundaries
# of words.
PIECES = [
    " ",
    "  ",
    "   ",
    " " * 7,
    " " * 24,
    " " * 25,
    " " * 60,
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    "\n \n",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    "\v",
    "\f",
    "\u0085",
    "\u2028",
    "\u1680",
    "\ufeff",
    "\x00",
    "\x1f",
    "\x1c",
    "\u180e",
    "don't",
    "I'LL",
    "we've",
    "'s",
    "'S",
    "\u2019s",
    "x'd",
    "'",
    "''",
    "''t",
    "'re",
    "'RE",
    "'Ve",
    "'\u017f",
    "'\u212a",
    "'\u017fs",
    "\u017f",
    "\u0130",
    "\u212a",
    "\u212b",
    "\ufb01",
    "\ufb05",
    "123",
    "1234567",
    "0",
    "\u0661\u0662",
    "\u00bd",
    "\u2167",
    "\u0e51\u0e52\u0e53\u0e54",
    "foo_bar",
    "XXIII",
    "000",
    "!!!",
    "-----",
    "-->",
    "=" * 70,
    "...",
    "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea",
    "\u4f60\u597d",
    "\u3053\u3093\u306b\u3061\u306f",
    "\ud55c\uad6d\uc5b4",
    "e\u0301",
    "\u00e9",
    "a\u0323\u0307",
    "a\u0307\u0323",
    "\u0915\u094d\u0937",
    "\u0b47\u0b3e",
    "\u1100\u1161\u11a8",
    "\uac00\u11a8",
    "\u0344",
    "\u0f71\u0f72",
    "\u1e9b\u0323",
    "\u0958",
    "\u2126",
    "\U0001d15e",
    "\u0f73",
    "\u05e9\u05c1\u05bc",
    "<|endoftext|>",
    "<|padding|>",
    "|||EMAIL_ADDRESS|||",
    "|||IP_ADDRESS|||",
    "<|endof",
    "text|>",
    "<|end<|endoftext|>",
    "||||||EMAIL_ADDRESS|||",
    "<|extra_id_0|>",
    "<|im_start|>",
    "<|fim_prefix|>",
    "\u01c5",
    "\u02b0",
    "a" * 63,
    "ab" * 40,
    "\u00df\u1e9e",
    "\ufffd",
    "\U0010ffff",
    "\ue000",
]
MARKS = [
    chr(c)
    for c in list(range(0x300, 0x370))
    + list(range(0x591, 0x5C8))
    + [0x93C, 0x94D, 0x3099, 0x309A, 0x1AB0, 0x20D0, 0x1D165, 0x0F71, 0x0F72, 0x0F74, 0x0345]
]


def decoded(b):
    return b.decode("utf-8", "replace")


def corpus(folder, parts=("",)):
    """Returns the texts of the .jsonl, .json.gz and .jsonl.zst files in a folder.

    The path of a file must have one of the parts in it.
    """
    out = []
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if ".json" not in path.name or not any(p in str(path) for p in parts):
            continue
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        elif path.suffix == ".zst":
            import zstandard

            raw = zstandard.ZstdDecompressor().stream_reader(raw).read()
        out += [json.loads(line)["text"] for line in raw.splitlines() if line.strip()]
    return out


def go(suffixes=None, longest=2_000_000, root=None):
    """Returns the files of the Go distribution with the suffixes, or all files without a zero byte.
    """
    root = root or subprocess.run(["go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout.strip()
    out = []
    for path in sorted(pathlib.Path(root).rglob("*")):
        if (
            path.is_symlink()
            or not path.is_file()
            or suffixes
            and path.suffix not in suffixes
            or not 0 < path.stat().st_size <= longest
        ):
            continue
        raw = path.read_bytes()
        if b"\0" not in raw[:8192]:
            out.append(decoded(raw))
    return out


def comments(texts):
    """Returns the comments of Go sources, mostly English: a text for each file with 1 kB of them.
    """
    out = []
    for text in texts:
        lines = [line[3:] for line in text.splitlines() if line.startswith("// ")]
        if sum(map(len, lines)) > 1000:
            out.append("\n".join(lines))
    return out


def messages(path):
    """Returns the joined translations of a gettext catalogue.

    Its header has magic, revision, count, offset of the originals, offset of the translations.
    """
    raw = pathlib.Path(path).read_bytes()
    if raw[:4] != b"\xde\x12\x04\x95":
        return ""
    count, _, at = struct.unpack_from("<3I", raw, 8)
    parts = []
    for i in range(1, count):  # the first is the header
        n, start = struct.unpack_from("<2I", raw, at + 8 * i)
        parts.append(raw[start : start + n].replace(b"\0", b"\n"))
    return decoded(b"\n".join(parts))


def catalogues(language):
    out = []
    for folder in ("/usr/share/locale", "/usr/share/vim"):
        for path in sorted(pathlib.Path(folder).glob(f"**/{language}/LC_MESSAGES/*.mo")):
            out.append(messages(path))
    return [t for t in out if len(t) > 200]


def manuals(language=None):
    """Returns the source of manual pages, in English if no language is passed."""
    out = []
    for folder in [f"/usr/share/man/{language}"] if language else [f"/usr/share/man/man{i}" for i in range(1, 9)]:
        for path in sorted(pathlib.Path(folder).rglob("*.gz")):
            if path.is_file() and not path.is_symlink():
                out.append(decoded(gzip.decompress(path.read_bytes())))
    return [t for t in out if len(t) > 200]


def html(most=20_000_000):
    """Returns HTML pages of installed manuals, up to about a number of characters."""
    out, total = [], 0
    roots = [
        "/usr/share/doc",
        *sorted(str(p) for p in pathlib.Path.home().glob(".rustup/toolchains/*/share/doc/rust/html")),
    ]
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                path = pathlib.Path(folder, name)
                if not name.endswith(".html") or path.is_symlink():
                    continue
                text = decoded(path.read_bytes())
                out.append(text)
                total += len(text)
                if total >= most:
                    return out
    return out


def adversarial(size, seed=1):
    """Returns random texts that defeat caches: hardly a word of them occurs twice."""
    r, out, total = random.Random(seed), [], 0
    word = lambda letters, n: "".join(r.choice(letters) for _ in range(n))
    point = lambda: r.choice(
        [r.randrange(32, 127), r.randrange(0x80, 0x800), r.randrange(0x800, 0xD800), r.randrange(0x10000, 0x1FFFF)]
    )
    kinds = [
        lambda: base64.b64encode(r.randbytes(3000)).decode(),
        lambda: " ".join(f"{r.getrandbits(128):032x}" for _ in range(120)),
        lambda: "".join(chr(r.randrange(0x4E00, 0x9FA5)) for _ in range(1300)),
        lambda: word(" \t\n\r\u3000\u00a0", 2500),
        lambda: word("ab", 4000),
        lambda: " ".join(word("abcdefghijklmnopqrstuvwxyz", r.randrange(1, 30)) for _ in range(250)),
        lambda: "".join(chr(point()) for _ in range(1500)),
        lambda: word("'s'tre.!?-/\\", 4000),
        lambda: word("0123456789,.", 4000),
    ]
    while total < size:
        out.append(r.choice(kinds)())
        total += len(out[-1].encode())
    return out


def cut(texts, size):
    """Returns the first texts, with size bytes in total. The last is cut."""
    out = []
    for t in texts:
        b = t.encode()
        if len(b) > size:
            b = b[:size]
            t = b.decode("utf-8", "ignore")
        if t:
            out.append(t)
        size -= len(b)
        if size <= 0:
            break
    return out


def spread(texts, size):
    """Returns an evenly spaced selection of the texts, with about size bytes in total."""
    total = sum(len(t.encode()) for t in texts)
    step = max(1, total // max(1, size))
    return cut(texts[::step], size)


def mix(size=18_000_000):
    """Returns a mix, in bytes: two thirds natural languages, one third code and HTML."""
    out, share = [], size * 2 // 3 // len(LANGUAGES)
    for language in LANGUAGES:
        out += cut(manuals(language) + catalogues(language), share)
    rest = size - sum(len(t.encode()) for t in out)
    out += spread(go({".go"}), rest // 2)
    out += spread(html(), rest // 4)
    out += spread(manuals(), rest - rest // 2 - rest // 4)
    return out


def pieces(texts, size=4096):
    """Cuts the texts into documents of about size bytes."""
    out = []
    for t in texts:
        b = t.encode()
        while len(b) > size:
            n = size
            while b[n] & 0xC0 == 0x80:
                n -= 1
            out.append(b[:n].decode())
            b = b[n:]
        if b:
            out.append(b.decode())
    return out


def nasty(r, corpus):
    """Returns a random text made of cuts of the corpus, PIECES, marks and stray code points.

    Golden files have its texts for their seeds.
    """
    parts = []
    for _ in range(r.randint(1, 6)):
        k = r.random()
        if k < 0.4:
            t = r.choice(corpus)
            at = r.randrange(len(t))
            parts.append(t[at : at + r.randint(1, 120)])
        elif k < 0.8:
            parts.extend(r.choice(PIECES) for _ in range(r.randint(1, 6)))
        elif k < 0.87:
            parts.append(
                "".join(
                    r.choice("aeiouXS\u0391 ")
                    + "".join(r.choices(MARKS, k=r.randint(0, 40 if r.random() < 0.1 else 4)))
                    for _ in range(r.randint(1, 5))
                )
            )
        elif k < 0.92:
            parts.append(
                "".join(
                    chr(c) for c in (r.randrange(0x110000) for _ in range(r.randint(1, 20))) if not 0xD800 <= c < 0xE000
                )
            )
        elif k < 0.96:
            parts.append("".join(chr(r.randrange(0x20, 0x3100)) for _ in range(r.randint(1, 20))))
        else:
            parts.append("".join(r.choice("abeinorst-=01 ") for _ in range(r.randint(1, 300))))
    return "".join(parts)


def write(path, texts):
    """Writes length-prefixed texts: a little-endian uint32 before the bytes of each."""
    with open(path, "wb") as f:
        for t in texts:
            b = t.encode()
            f.write(struct.pack("<I", len(b)))
            f.write(b)
