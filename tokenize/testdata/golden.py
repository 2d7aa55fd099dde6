"""Writes the golden files of package tokenize's tests with Hugging Face tokenizers.

    pip install tokenizers==0.23.3
    python golden.py

text.txt       a text from a small random generator, on which the tokenizers are trained
gpt2.json      a tokenizer that the library trains on it, with GPT-2's pattern
cl100k.json    the same with cl100k's pattern
olmo.json      like OLMo v1.5: NFC, white space and other added tokens, merges as strings, ByteLevel
               post-processor
golden.json    versions; documents with the library's ids, with special tokens as text and as tokens
               (null if equal); texts and their NFC; and hashes of NFC and of the words of the
               patterns. The hashes cover all code points (one in 251 from U+33000 on, where almost
               none is assigned), in the contexts nfc_contexts and word_contexts
"""

import hashlib
import json
import pathlib
import random
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "conformance"))
from texts import MARKS, PIECES, nasty  # noqa: E402

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|padding|>"]

SENTENCES = [
    "It's a small text, and it doesn't say much; we've seen that they'll read it anyway.",
    "Größe und Straße: über 1.234,56 Euro – „schön“, nicht wahr?",
    "L'été dernier, à l'hôtel, ç'a été très agréable.",
    "Быстрая лиса прыгает через ленивую собаку 42 раза.",
    "你好，世界。今天天气很好，我们去公园散步。",
    "こんにちは、世界。カタカナとひらがなを混ぜて書く。",
    "안녕하세요 세계, 오늘은 날씨가 좋습니다.",
    "नमस्ते दुनिया, आज मौसम अच्छा है।",
    "مرحبا بالعالم، الجو جميل اليوم",
    "def f(x):\n    if x == 0:\n        return [0] * 10\n    return f(x - 1)  # ----------------\n",
    "| a | b |\n|---|---|\n| 1 | 2000 |\n==========\n",
    "aaaaaaaa aaaa aaaaaaaaaaaaaaa aa ababababab hahahaha!!!! ........",
    "e\u0301te\u0301 a\u0308 \U0001f600\U0001f600 \u2026 \u20ac100 \u00bd \u2167",
]


def make_text(r):
    syllables = [
        a + b for a in "b c d f g h l m n p r s t v th sh st".split() for b in "a e i o u ee ou er an in".split()
    ]
    words = ["".join(r.choices(syllables, k=r.choice([1, 1, 2, 2, 3, 4]))) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(len(words))]
    lines = []
    for i in range(450):
        if i % 9 == 0:
            lines.append(r.choice(SENTENCES))
            continue
        line = r.choices(words, weights, k=r.randint(3, 14))
        line[0] = line[0].capitalize()
        if r.random() < 0.3:
            line.insert(r.randrange(len(line)), str(r.randrange(10 ** r.randint(1, 7))))
        if r.random() < 0.3:
            k = r.randrange(len(line))
            line[k] += r.choice(["'s", ",", ";", " --", "'ll", ":", " = ", "..."])
        lines.append(" ".join(line) + r.choice([".", "!", "?", "", " ", "\n", ".\r"]))
    return "\n".join(lines)


def train(text, pre_tokenizer, normalizer=None, vocab_size=640):
    t = Tokenizer(models.BPE())
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizer
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    t.train_from_iterator(text.split("\n\n"), trainer)
    return t


def olmo(text):
    t = train(text, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC())
    t.post_processor = processors.ByteLevel(trim_offsets=True, add_prefix_space=False)
    t.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    t.add_tokens(
        [
            AddedToken("|||EMAIL_ADDRESS|||", normalized=True),
            AddedToken("|||IP_ADDRESS|||", normalized=False),
            AddedToken("cafe\u0301", normalized=True),
        ]
    )
    t.add_special_tokens([AddedToken("<|im_start|>", normalized=True, special=True)])
    file = json.loads(t.to_str())
    file["model"]["merges"] = [" ".join(m) for m in file["model"]["merges"]]
    return file


def nfc_contexts(c):
    return [c, "a" + c, c + "\u0301", "\u0345" + c + "\u0316", "\u1100" + c + "\u11a8"]


def word_contexts(c):
    return [
        "'" + c + "e",
        "a" + c + "1" + c + "2",
        " " + c + c + "\n " + c + ".",
        "\u00a0" + c + "!" + c + "\r\n" + c,
        "'l" + c,
    ]


# hashAll in normalform_test.go must hash the same texts.
def hash_all(contexts, function):
    h = hashlib.sha256()
    for c in range(0x110000):
        if 0xD800 <= c < 0xE000 or c >= 0x33000 and c % 251 != 0:
            continue
        for s in contexts(chr(c)):
            h.update(function(s).encode())
            h.update(b"\n")
    return h.hexdigest()


def main():
    r = random.Random(20)
    text = make_text(r)
    (HERE / "text.txt").write_bytes(text.encode())
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    train(text, pre_tokenizers.ByteLevel(add_prefix_space=False)).save(str(HERE / "gpt2.json"))
    train(text, split).save(str(HERE / "cl100k.json"))
    (HERE / "olmo.json").write_text(json.dumps(olmo(text), ensure_ascii=False, indent=1))

    documents = PIECES + [nasty(r, [text]) for _ in range(100)]
    documents += [
        "x" * 300,
        "ab" * 200 + "c",
        "=" * 200,
        " " * 300 + "x",
        "o" + "".join(r.choices(MARKS, k=120)) + "!",
        "caf\u00e9 cafe\u0301 cafe\u0301\u0301",
    ]
    ids = {}
    for name in ("gpt2", "cl100k", "olmo"):
        t = Tokenizer.from_file(str(HERE / (name + ".json")))
        t.encode_special_tokens = True
        as_text = ids[name + ".text"] = [t.encode(d).ids for d in documents]
        t.encode_special_tokens = False
        as_tokens = [t.encode(d).ids for d in documents]
        ids[name + ".tokens"] = [b if b != a else None for a, b in zip(as_text, as_tokens, strict=True)]

    nfc = normalizers.NFC().normalize_str
    marks = [
        "".join(r.choices(MARKS + list("aAeo\u1100\u1161\u11a8\uac00\u0b47\u0b3e"), k=r.choice([3, 8, 20, 90])))
        for _ in range(60)
    ]
    hashes = {"nfc": hash_all(nfc_contexts, nfc)}
    for name, pattern in (("gpt2", GPT2), ("cl100k", CL100K)):
        pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated").pre_tokenize_str
        hashes[name] = hash_all(word_contexts, lambda s: "\x00".join(p for p, _ in pieces(s)))
    golden = {
        "versions": "tokenizers %s, python %s, unicodedata %s"
        % (tokenizers.__version__, sys.version.split()[0], unicodedata.unidata_version),
        "documents": documents,
        "ids": ids,
        "nfc": [[m, nfc(m)] for m in marks],
        "hashes": hashes,
    }
    (HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")))
    print(golden["versions"], len(documents), "documents")


if __name__ == "__main__":
    main()
