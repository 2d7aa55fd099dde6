"""Writes splits.json: how Hugging Face tokenizers splits text, for the tests of package tokenize.

    pip install tokenizers==0.23.3
    python splits.py

scanners    for each sequence of Split patterns that has a hand-written scanner: a hash of the words
            of all code points (one in 251 from U+33000 on) in some contexts, and texts with the
            lengths of their words in characters
patterns    regular expressions, texts, and the matches
characters  hashes of the kinds of characters, one byte for each code point, and of the lower cases
forms       hashes of the normal forms of all code points in some contexts, and texts with their
            normal forms
"""

import hashlib
import json
import pathlib
import random

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

HERE = pathlib.Path(__file__).parent
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?"""
    r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
SCANNERS = {
    "gpt2": [GPT2],
    "cl100k": [CL100K],
    "qwen2": [QWEN2],
    "o200k": [O200K],
    "tekken": [TEKKEN],
    "deepseek": DEEPSEEK,
}

# The code point replaces "%".
WORD_CONTEXTS = ["%", "'%e", "a%1%2", " %%\n %.", "\u00a0%!%\r\n%", "'l%", "A%a", "%A", "\u0301%B", "/%\u3042", ".%/ %"]
FORM_CONTEXTS = ["%", "a%", "%\u0301", "\u0345%\u0316", "\u1100%\u11a8", "\u09c7%"]

ALPHABET = (
    list(" '\u017f\u212a\r\n\u00a0\u2028\u3000\t/aAbBsSlLdDvVeErRtTmM!.-09\u0000")
    + [
        "\u0660",
        "\u0967",
        "\u00bd",
        "\u2167",
        "\u3007",
        "\u0301",
        "\u093f",
        "\u094d",
        "\u20dd",
        "\U0001f600",
        "\u200d",
        "\ufe0f",
        "\u1100",
        "\u1161",
        "\u11a8",
    ]
    + [
        "\uac00",
        "\u01c5",
        "\u02b0",
        "\u00aa",
        "\u00e9",
        "\u00c9",
        "\u4f60",
        "\u3042",
        "\u30fc",
        "\u30fb",
        "\u3099",
        "\u0085",
        "\u180e",
        "\u200b",
        "\u0378",
        "\ue000",
    ]
    + ["'ll", "'S", "'Re", "  ", "\r\n", "don't", " the", "Hello", "123"]
)

PATTERNS = [
    # published
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| "
    r"?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"[0-9][0-9][0-9]",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"(?=(\d{3})+(?!\d))",
    r"\s?\p{L}+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\d{1}",
    r"[\r\n]",
    r" {2,}",
    # odd
    r"a{1,3}+", r"a{2}+b?", r"a?+a", r"a++a|a", r"a*+a|b", r"a{1,2}?", r"a{2}?b", r"a{,2}b", r"a{2,}?", r"a{ 1}", r"a{",
    r"a{x}", r"a{2,3", r"(?:a+)++a|ab", r"(?:ab|a)*?b",
    r"^a", r"a$", r"a\z", r"a\Z", r"\Aa", r"\n$", r"^\s", r"$", r"^", r"(?m:.)", r".", r"(?m).+", r"[^\n]*\n?", r"\ba",
    r"a\b", r"\B.", r"\b",
    r"(?i)a|B", r"a(?i)b|s", r"(?i:s)", r"(?i:k+)", r"(?i:[a-z]+)", r"(?i:[^a])", r"(?i:[b-d]e?)", r"(?i:\x61)",
    r"(?i:\p{Lu})", r"(?i:i)", r"(?i:\u03c3)", r"(?i)(?-i:a)a", r"(?im:a.)", r"(?i:é)",
    r"(?i:ss*)", r"(?i:s{2})", r"(?i:[\p{Nd}\p{P}a]+)",
    r"[a-c[x-z]]+", r"[a-z&&[^c]]+", r"[^a-z&&[^c]]+", r"[^a[b]]+", r"[^[^a]b]+", r"[a-]", r"[-a]+", r"[[:alpha:]]+",
    r"[[:^alpha:]]+", r"[[:punct:]]+", r"[+--]+", r"[a\]b]+", r"[.]", r"[$^|()*+?{}]+", r"[\b]", r"[\h]+", r"\H+",
    r"[\x41-\x{43}]+", r"[\P{L}\d]+", r"[\W_]+", r"[\w]+", r"[^\w]+", r"\p{Word}", r"[\p{^Word}]",
    r"\x0A", r"\x{61}+", r"\u0041", r"\-", r"\é", r"\/", r"\t|\v|\f|\a|\e", r"]", r"}",
    r"\p{^L}+", r"\P{^L}+", r"\p{letter}+", r"\p{ upper case-letter }", r"\p{Uppercase_Letter}+", r"\p{Alphabetic}+",
    r"\p{Emoji}", r"\p{Extended_Pictographic}", r"\p{Greek}+|\p{Hiragana}+", r"\p{Punct}+", r"\p{Word}+", r"\p{Cn}",
    r"\p{Co}", r"\p{Cc}+", r"\p{Cf}", r"\p{Sm}", r"\p{ASCII}+", r"\p{Any}", r"\w+", r"\W+", r"\d+", r"\D+", r"\s+",
    r"\S+",
    r"(?<=a)b", r"(?<!a)b", r"(?<=a|bb)d|s", r"(?<!a|b)s", r"(?<=\s)\S", r"(?<=^)\S+", r"(?>a+)a|ab", r"(?>a|ab)b",
    r"(?=a)\w+", r"(?!a)\w+", r"(?!\w\d).", r"(?=(?>a*)b)a", r"(?=[^b]*b)a",
    r"a|", r"|a", r"", r"a*", r"a*?", r"(?:a|b)*?c|d", r"(?:a|b){2,3}?", r"(?:ab?){2}", r"(?:a|ab)(?:c|bcd)?",
    r"(?:a{1,2}){2}b", r"(a)(b)?",
]  # fmt: skip

PATTERN_TEXTS = [
    "aaaaaaab aab ab b a", "aB Ab\nab\n\na\r\nba\n",
    "sS\u017f kK\u212a iI\u0131\u0130 \u03c3\u03c2\u03a3 ss \u00df \u01c4\u01c5\u01c6 \u00e9\u00c9 e\u0301",
    "abcxyz-]^[.,!?\u2026()|{}$*+ a{x} a{ 1} a{2,3 a{",
    "12345678 1,234 \u0661\u0662\u0663\u0664 12ab34 \u00bd\u2167_",
    "It's DON'T we'LL x'\u017f 'Re'vE HelloWorld fooBAR\u4f60\u597dHan\u3042\u30ab\u1100",
    " \t\v\f\a\x1b\b\x00\u0085\u00a0\u3000\u2028 \n x  ",
    "\U0001f600\u200d\U0001f525\ufe0f\u0378\ue000\ufffe\u03b1\u0391+<=>~`\u20ac%", "bad abd bbd sad -/\\\"'#@",
    "\u0915\u094d\u0937\u093f o\u0308 \u24b6 \u2460 \u0e01\u0e33 \u00aa\u02b0",
]  # fmt: skip


def fill(context, c):
    return context.replace("%", c)


def hash_all(contexts, function):
    h = hashlib.sha256()
    for c in CODE_POINTS:
        if c >= 0x33000 and c % 251 != 0:
            continue
        for context in contexts:
            h.update(function(fill(context, chr(c))).encode())
            h.update(b"\n")
    return h.hexdigest()


def characters():
    def pieces(pre_tokenizer, context):
        cut = pre_tokenizer.pre_tokenize_str
        return lambda c: [p for p, _ in cut(fill(context, c))]

    def changed(normalizer):
        return lambda c: normalizer.normalize_str(c)

    def bert(**on):
        options = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
        return normalizers.BertNormalizer(**(options | on))

    strip, words, digits = (
        changed(normalizers.Strip()),
        pieces(pre_tokenizers.Whitespace(), "a%"),
        pieces(pre_tokenizers.Digits(), "1%"),
    )
    punctuation, clean, chinese = (
        pieces(pre_tokenizers.BertPreTokenizer(), "a%a"),
        changed(bert(clean_text=True)),
        changed(bert(handle_chinese_chars=True)),
    )
    accents, marks, nfd = (
        changed(bert(strip_accents=True)),
        changed(normalizers.StripAccents()),
        changed(normalizers.NFD()),
    )
    kinds = {
        "white_space": lambda c: strip(c) == "",
        "word": lambda c: words(c) == ["a" + c],
        "numeric": lambda c: len(digits(c)) == 1,
        "punctuation": lambda c: len(punctuation(c)) == 3,
        "bert_control": lambda c: clean(c) == "",
        "bert_space": lambda c: clean(c) == " ",
        "bert_chinese": lambda c: chinese(c) != c,
        "mark": lambda c: marks(c) == "",
        "bert_mark": lambda c: accents(c) == "" and nfd(c) == c,
    }
    out = {
        name: hashlib.sha256(bytes(is_kind(chr(c)) for c in CODE_POINTS)).hexdigest() for name, is_kind in kinds.items()
    }
    lower = normalizers.Lowercase().normalize_str
    out["lower"] = hashlib.sha256("".join(lower(chr(c)) for c in CODE_POINTS).encode()).hexdigest()
    cut = pre_tokenizers.UnicodeScripts().pre_tokenize_str
    neighbours = bytearray()
    for c in CODE_POINTS:
        # Not at the start, where U+0020 would be lost.
        neighbours.append(
            len(cut("a" + chr(c) + chr(c + 1 if c + 1 in range(0xD800) or 0xE000 <= c + 1 < 0x110000 else 0x3042)))
        )
    out["scripts"] = hashlib.sha256(bytes(neighbours)).hexdigest()
    return out


def main():
    r = random.Random(4)
    texts = ["".join(r.choices(ALPHABET, k=r.choice([3, 6, 12, 30]))) for _ in range(160)]
    scanners = {}
    for name, regexes in SCANNERS.items():
        cut = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(x), behavior="isolated") for x in regexes]
        ).pre_tokenize_str
        scanners[name] = {
            "regexes": regexes,
            "hash": hash_all(WORD_CONTEXTS, lambda s: "\x00".join(p for p, _ in cut(s))),
            "lengths": [[b - a for _, (a, b) in cut(t)] for t in texts],
        }
    patterns = []
    for regex in PATTERNS:
        cut = pre_tokenizers.Split(Regex(regex), behavior="removed", invert=True).pre_tokenize_str
        patterns.append({"regex": regex, "matches": [[[a, b] for _, (a, b) in cut(t)] for t in PATTERN_TEXTS]})
    forms = {}
    marks = list(
        "aAe\u0301\u0323\u0308\u0345\u0334\u1100\u1161\u11a8\uac00\uac01\u09c7\u09be\u0b47\u0b3e\u093c"
        "\u0928\u0344\u212b\ufb01\u00bd\u3099\u304b\uff76\uff9e\u1e9b\u0f73\u0f71\u0f72 \n"
    )
    marked = ["".join(r.choices(marks, k=r.choice([3, 8, 20, 90]))) for _ in range(60)]
    for name in ("NFC", "NFD", "NFKC", "NFKD"):
        normalize = getattr(normalizers, name)().normalize_str
        forms[name] = {"hash": hash_all(FORM_CONTEXTS, normalize), "texts": [normalize(m) for m in marked]}
    out = {
        "versions": "tokenizers " + tokenizers.__version__,
        "word_contexts": WORD_CONTEXTS,
        "form_contexts": FORM_CONTEXTS,
        "texts": texts,
        "scanners": scanners,
        "pattern_texts": PATTERN_TEXTS,
        "patterns": patterns,
        "characters": characters(),
        "marked": marked,
        "forms": forms,
    }
    (HERE / "splits.json").write_text(
        json.dumps(out, ensure_ascii=False, separators=(",", ":")).replace(']]},{"regex"', ']]},\n{"regex"') + "\n",
        encoding="utf-8",
    )
    print(out["versions"], len(patterns), "patterns")


if __name__ == "__main__":
    main()
