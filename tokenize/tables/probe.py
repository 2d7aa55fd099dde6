"""Writes the Unicode tables of package tokenize by asking Hugging Face tokenizers.

    pip install tokenizers==0.23.3
    python probe.py            # writes the three tables into this folder, in some minutes
    python probe.py --check    # fails if the library's results differ from the tables

The library does not publish the tables that it was built with, so the script derives each fact from
its behaviour:

oniguruma.tsv
    The tables of the regular expressions of Split and Replace, which are Oniguruma's. A property
    has the code points that \\p{..} matches in a text of all code points (for scripts: of all
    assigned code points; the unassigned are tried together). A character has case variants if a
    case-insensitive class of all other code points matches it. All such characters are then
    compared with each other. Characters that match several characters come from Python's full case
    folding, confirmed by a match.

rust.tsv
    The tables of the other normalizers and pre-tokenizers, from Rust's standard library and several
    crates. The pre-tokenizers cut a text of all code points. The normalizers process each code
    point separately.

normalforms.tsv
    The decompositions of c are the results of the NFD and NFKD normalizers. c has a non-zero
    combining class exactly if it swaps with a preceding mark of class 240 or a following mark of
    class 1. The class's number is Python's, and is compared with every other class by the same
    test. A pair composes if the NFC normalizer joins it. Candidates are the characters that NFC
    keeps and NFD decomposes. Hangul is computed and not in the table. To find missing pairs, every
    code point is tried before every second half of a pair, and a sample of first halves before
    every code point.
"""

import argparse
import pathlib
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

VERSION = "0.23.3"
HERE = pathlib.Path(__file__).parent
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)

# Code points without a category here are Cn.
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
PROPERTIES = (
    "White_Space Alphabetic Lowercase Uppercase Alnum Word PosixPunct Ideographic Emoji Emoji_Presentation "
    "Extended_Pictographic"
).split()
SCRIPTS = (
    "Adlam Ahom Anatolian_Hieroglyphs Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak Bengali Bhaiksuki "
    "Bopomofo Brahmi Braille Buginese Buhid "
    "Canadian_Aboriginal Carian Caucasian_Albanian Chakma Cham Cherokee Chorasmian Common Coptic Cuneiform Cypriot "
    "Cypro_Minoan Cyrillic Deseret Devanagari "
    "Dives_Akuru Dogra Duployan Egyptian_Hieroglyphs Elbasan Elymaic Ethiopic Garay Georgian Glagolitic Gothic Grantha "
    "Greek Gujarati Gunjala_Gondi Gurmukhi "
    "Gurung_Khema Han Hangul Hanifi_Rohingya Hanunoo Hatran Hebrew Hiragana Imperial_Aramaic Inherited "
    "Inscriptional_Pahlavi Inscriptional_Parthian Javanese "
    "Kaithi Kannada Katakana Kawi Kayah_Li Kharoshthi Khitan_Small_Script Khmer Khojki Khudawadi Kirat_Rai Lao Latin "
    "Lepcha Limbu Linear_A Linear_B Lisu Lycian "
    "Lydian Mahajani Makasar Malayalam Mandaic Manichaean Marchen Masaram_Gondi Medefaidrin Meetei_Mayek Mende_Kikakui "
    "Meroitic_Cursive Meroitic_Hieroglyphs "
    "Miao Modi Mongolian Mro Multani Myanmar Nabataean Nag_Mundari Nandinagari New_Tai_Lue Newa Nko Nushu "
    "Nyiakeng_Puachue_Hmong Ogham Ol_Chiki Ol_Onal "
    "Old_Hungarian Old_Italic Old_North_Arabian Old_Permic Old_Persian Old_Sogdian Old_South_Arabian Old_Turkic "
    "Old_Uyghur Oriya Osage Osmanya Pahawh_Hmong "
    "Palmyrene Pau_Cin_Hau Phags_Pa Phoenician Psalter_Pahlavi Rejang Runic Samaritan Saurashtra Sharada Shavian "
    "Siddham SignWriting Sinhala Sogdian "
    "Sora_Sompeng Soyombo Sundanese Sunuwar Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le Tai_Tham Tai_Viet Takri Tamil "
    "Tangsa Tangut Telugu Thaana Thai Tibetan "
    "Tifinagh Tirhuta Todhri Toto Tulu_Tigalari Ugaritic Vai Vithkuqi Wancho Warang_Citi Yezidi Yi Zanabazar_Square"
).split()


def ranges(points):
    """Returns the first and the last code point of each run in ascending code points."""
    out = []
    for c in points:
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def lines(name, points):
    """Returns lines of a name and ranges, of at most about 140 characters."""
    out, line = [], name
    for first, last in ranges(points):
        item = "%X" % first if first == last else "%X-%X" % (first, last)
        if len(line) + len(item) > 140:
            out.append(line)
            line = name
        line += ("\t" if line == name else " ") + item
    out.append(line)
    return "".join(x + "\n" for x in out) if "\t" in out[0] else ""


def matched(regex, points):
    """Returns the ascending code points that a regex matches in a text of all of them.

    The regex must match runs of characters.
    """
    pieces = pre_tokenizers.Split(Regex(regex), behavior="removed", invert=True).pre_tokenize_str(
        "".join(map(chr, points))
    )
    return [c for _, (a, b) in pieces for c in points[a:b]]


def oniguruma():
    out = [
        "# What Oniguruma in tokenizers %s knows of characters, written by probe.py: the name of a general category, "
        "property or\n"
        "# script, and code points and ranges that have it, over several lines.\n"
        "# fold: characters that match each other without regard to case\n"
        "# many: a character, and the several characters that match it so\n" % VERSION
    ]
    category = {}
    for name in CATEGORIES:
        found = matched(r"\p{%s}+" % name, CODE_POINTS)
        assert not any(c in category for c in found), name
        category.update(dict.fromkeys(found, name))
        out.append(lines(name, found))
    unassigned = [c for c in CODE_POINTS if c not in category]
    assert unassigned == matched(r"\p{Cn}+", CODE_POINTS)
    for group in "LMNPSZ":
        assert [c for c in CODE_POINTS if category.get(c, "C")[0] == group] == matched(
            r"\p{%s}+" % group, CODE_POINTS
        ), group
    for name in PROPERTIES:
        out.append(lines(name, matched(r"\p{%s}+" % name, CODE_POINTS)))
    # \\w matches some fractions and superscripts, but not in brackets.
    word = set(matched(r"[\w]+", CODE_POINTS))
    assert word <= set(matched(r"\w+", CODE_POINTS))
    out.append(lines("Word_But_Not_In_Brackets", [c for c in matched(r"\w+", CODE_POINTS) if c not in word]))
    for regex, name in (
        (r"\w+", "Word"), (r"\d+", "Nd"), (r"\s+", "White_Space"), (r"\p{Space}+", "White_Space"), (r"\p{Alpha}+",
        "Alphabetic"), (r"\p{Lower}+", "Lowercase"),
        (r"\p{Upper}+", "Uppercase"), (r"\p{Digit}+", "Nd"), (r"\p{Punct}+", "P"), (r"\p{Cntrl}+", "Cc"),
        (r"[[:alpha:]]+", "Alphabetic"), (r"[[:alnum:]]+", "Alnum"),
        (r"[[:space:]]+", "White_Space"), (r"[[:punct:]]+", "PosixPunct"), (r"[[:lower:]]+", "Lowercase"),
        (r"[[:upper:]]+", "Uppercase"),
        (r"[[:digit:]]+", "Nd"), (r"[[:cntrl:]]+", "Cc"),
    ):  # fmt: skip
        assert matched(regex, CODE_POINTS) == matched(r"\p{%s}+" % name, CODE_POINTS), regex
    assigned = [c for c in CODE_POINTS if c in category and category[c] != "Co"]
    private = [c for c in CODE_POINTS if category.get(c) == "Co"]
    assert not matched("[" + "".join(r"\p{%s}" % name for name in SCRIPTS) + "]+", unassigned + private)
    for name in SCRIPTS:
        out.append(lines(name, matched(r"\p{%s}+" % name, assigned)))

    # Letters with case and marks are tested one by one. For all others, a single test checks
    # whether one of the letters matches.
    candidates = sorted(set(matched(r"[\p{Lowercase}\p{Uppercase}\p{Lt}\p{M}]+", CODE_POINTS)))
    cased = [c for c in candidates if has_case(c)]
    rest = sorted(set(CODE_POINTS) - set(candidates))
    assert not matched(r"(?i:[\p{Lowercase}\p{Uppercase}\p{Lt}\p{M}]+)", rest)
    text = "\n".join(map(chr, cased))
    done = set()
    for c in cased:
        if c in done:
            continue
        pieces = pre_tokenizers.Split(Regex("(?i:%s)" % escape(c)), behavior="removed", invert=True).pre_tokenize_str(
            text
        )
        alike = [ord(p) for p, _ in pieces]
        assert alike == sorted(set(alike)) and c in alike and len(alike) > 1 and not done & set(alike), hex(c)
        done.update(alike)
        out.append("fold\t%s\n" % " ".join("%X" % a for a in alike))
    for c in CODE_POINTS:
        folded = chr(c).casefold()
        if len(folded) > 1:
            assert matches("(?i:%s)" % escape(c), folded), hex(c)
            out.append("many\t%X\t%s\n" % (c, " ".join("%X" % ord(f) for f in folded)))
    return "".join(out)


def escape(c):
    return r"\x{%X}" % c


def matches(regex, text):
    return [
        p for p, _ in pre_tokenizers.Split(Regex(regex), behavior="removed", invert=True).pre_tokenize_str(text)
    ] == [text]


def has_case(c):
    others = ([r"\x{0}-\x{%X}" % (c - 1)] if c > 0 else []) + ([r"\x{%X}-\x{10FFFF}" % (c + 1)] if c < 0x10FFFF else [])
    return matches("(?i:[%s])" % "".join(others), chr(c))


def rust():
    text = "".join(map(chr, CODE_POINTS))

    def kept(pre_tokenizer):
        return [c for _, (a, b) in pre_tokenizer.pre_tokenize_str(text) for c in CODE_POINTS[a:b]]

    out = [
        "# What the parts of tokenizers %s that do not use Oniguruma know of characters, written by probe.py: a name, "
        "and code points and ranges.\n"
        "# lower: a character and its lower case\n"
        "# script: code points of one script as UnicodeScripts cuts; the first line is what it never cuts at\n"
        % VERSION
    ]
    # WhitespaceSplit drops white space and Whitespace keeps \w together.
    dropped = set(CODE_POINTS) - set(kept(pre_tokenizers.WhitespaceSplit()))
    assert (
        dropped
        == set(CODE_POINTS) - set(kept(pre_tokenizers.Whitespace()))
        == set(CODE_POINTS) - set(kept(pre_tokenizers.BertPreTokenizer()))
    )
    strip = normalizers.Strip().normalize_str
    assert dropped == {c for c in CODE_POINTS if strip(chr(c)) == ""}
    out.append(lines("white_space", sorted(dropped)))
    words = pre_tokenizers.Whitespace().pre_tokenize_str
    out.append(lines("word", [c for c in CODE_POINTS if len(words("a" + chr(c))) == 1 and c not in dropped]))
    numeric = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str
    out.append(lines("numeric", [c for c in CODE_POINTS if len(numeric("1" + chr(c))) == 1]))
    punctuation = {}
    for name in ("Punctuation", "BertPreTokenizer"):
        pieces = getattr(pre_tokenizers, name)().pre_tokenize_str
        punctuation[name] = [c for c in CODE_POINTS if c not in dropped and len(pieces("a" + chr(c) + "a")) == 3]
    assert punctuation["Punctuation"] == punctuation["BertPreTokenizer"]
    out.append(lines("punctuation", punctuation["Punctuation"]))

    def bert(**on):
        options = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
        return normalizers.BertNormalizer(**(options | on)).normalize_str

    clean, chinese, accents = bert(clean_text=True), bert(handle_chinese_chars=True), bert(strip_accents=True)
    strip_accents, nfd = normalizers.StripAccents().normalize_str, normalizers.NFD().normalize_str
    removed, spaces = [], []
    for c in CODE_POINTS:
        s = chr(c)
        cleaned = clean(s)
        if cleaned != s or s == " ":
            assert cleaned in ("", " "), hex(c)
            (spaces if cleaned else removed).append(c)
    out.append(lines("bert_control", removed))
    out.append(lines("bert_space", spaces))
    for c in CODE_POINTS:
        assert chinese(chr(c)) in (chr(c), " " + chr(c) + " "), hex(c)
    out.append(lines("bert_chinese", [c for c in CODE_POINTS if chinese(chr(c)) != chr(c)]))
    marks = [c for c in CODE_POINTS if strip_accents(chr(c)) == ""]
    bert_marks = [c for c in CODE_POINTS if nfd(chr(c)) == chr(c) and accents(chr(c)) == ""]
    bert_marked = set(map(chr, bert_marks))
    out.append(lines("mark", marks))
    out.append(lines("bert_mark", bert_marks))
    for c in CODE_POINTS:
        assert strip_accents(chr(c)) in ("", chr(c)), hex(c)
        assert accents(chr(c)) == "".join(x for x in nfd(chr(c)) if x not in bert_marked), hex(c)

    lower, bert_lower = normalizers.Lowercase().normalize_str, bert(lowercase=True)
    for c in CODE_POINTS:
        s = lower(chr(c))
        assert s == bert_lower(chr(c)) and lower("a" + chr(c)) == "a" + s, hex(c)
        if s != chr(c):
            out.append("lower\t%X\t%s\n" % (c, " ".join("%X" % ord(x) for x in s)))

    cut = pre_tokenizers.UnicodeScripts().pre_tokenize_str
    uncut, scripts, last = [], {}, "\x00"
    for c in CODE_POINTS:
        s = chr(c)
        if len(cut("a" + s)) == 1 and len(cut("\u0436" + s)) == 1:
            uncut.append(c)
            continue
        for r in [last, *scripts]:
            if len(cut(r + s)) == 1:
                last = r
                break
        else:
            last = s
        scripts.setdefault(last, []).append(c)
    out.append(lines("script0", uncut))
    for i, points in enumerate(sorted(scripts.values())):
        out.append(lines("script%d" % (i + 1), points))
    return "".join(out)


def normal_forms():
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str

    # Combining classes. U+0334 has class 1 and U+0345 has class 240, the lowest and the highest.
    low, high = "\u0334", "\u0345"
    ccc = {}
    for c in CODE_POINTS:
        s = chr(c)
        if nfd(s) != s:
            continue
        if nfd("a" + s + low) == "a" + low + s or nfd("a" + high + s) == "a" + s + high or s in (low, high):
            ccc[c] = unicodedata.combining(s)
            assert ccc[c] > 0, hex(c)
    representatives = {}
    for c, k in sorted(ccc.items()):
        representatives.setdefault(k, c)
    for c, k in ccc.items():
        for other, r in representatives.items():
            pair = chr(r) + chr(c)
            want = pair if other <= k else pair[::-1]
            assert nfd("a" + pair)[1:] == want, (hex(c), hex(r))

    decompositions, pairs = {}, {}
    for c in CODE_POINTS:
        s = chr(c)
        d = nfd(s)
        if c in HANGUL or d == s:
            continue
        decompositions[c] = d
        if nfc(s) == s:
            head = nfc(d[:-1])
            assert len(head) == 1 and nfc(head + d[-1]) == s, hex(c)
            pairs[head + d[-1]] = s
    complete(nfc, decompositions, pairs)
    nfkd, nfkc = normalizers.NFKD().normalize_str, normalizers.NFKC().normalize_str
    compatible = {c: nfkd(chr(c)) for c in CODE_POINTS if c not in HANGUL and nfkd(chr(c)) != nfd(chr(c))}
    for c in CODE_POINTS:
        assert nfkc(chr(c)) == nfc(nfkd(chr(c))), hex(c)

    out = [
        "# Data of the normal forms as in tokenizers %s, which is that of Unicode 9, written by probe.py. Hangul is "
        "left out.\n"
        "# class: first and last code point of a range, combining class; all numbers are hexadecimal\n"
        "# decomposition: code point, full canonical decomposition\n"
        "# compatible: code point, full compatibility decomposition where it is another\n"
        "# pair: first half, second half, composite\n" % VERSION
    ]
    ranges = []
    for c, k in sorted(ccc.items()):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == k:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, k])
    out += ["class\t%04X\t%04X\t%02X\n" % tuple(r) for r in ranges]
    out += [
        "decomposition\t%04X\t%s\n" % (c, " ".join("%04X" % ord(x) for x in d))
        for c, d in sorted(decompositions.items())
    ]
    out += ["compatible\t%04X\t%s\n" % (c, " ".join("%04X" % ord(x) for x in d)) for c, d in sorted(compatible.items())]
    out += ["pair\t%04X\t%04X\t%04X\n" % (ord(p[0]), ord(p[1]), ord(s)) for p, s in sorted(pairs.items())]
    return "".join(out)


def complete(nfc, decompositions, pairs):
    """Fails if the normalizer joins a pair that is neither in pairs nor Hangul."""

    def expected(a, b):
        if a + b in pairs:
            return pairs[a + b]
        if 0x1100 <= ord(a) < 0x1113 and 0x1161 <= ord(b) < 0x1176:
            return chr(0xAC00 + (ord(a) - 0x1100) * 588 + (ord(b) - 0x1161) * 28)
        if ord(a) in HANGUL and (ord(a) - 0xAC00) % 28 == 0 and 0x11A7 < ord(b) < 0x11C3:
            return chr(ord(a) + ord(b) - 0x11A7)
        return a + b

    def compare(candidates):
        # One call for many pairs: a line break neither composes nor reorders.
        candidates = [(a, b) for a, b in candidates if ord(a) not in decompositions and ord(b) not in decompositions]
        got = nfc("\n".join(a + b for a, b in candidates)).split("\n")
        for (a, b), g in zip(candidates, got, strict=True):
            want = expected(a, b)
            if g != want and g != b + a:  # b + a: two marks were swapped
                sys.exit("U+%04X U+%04X: %r, not %r" % (ord(a), ord(b), g, want))

    everything = [chr(c) for c in CODE_POINTS if c != 10]
    for b in sorted({p[1] for p in pairs} | {"\u1161", "\u1175", "\u11a8", "\u11c2"}):
        compare([(a, b) for a in everything])
    for a in [
        "A",
        "e",
        "\u03b1",
        "\u0915",
        "\u09c7",
        "\u0b47",
        "\u0cc6",
        "\u3046",
        "\u1100",
        "\uac00",
        "\U00011131",
        "\U000115b8",
    ]:
        compare([(a, b) for b in everything])


def main():
    parser = argparse.ArgumentParser(description="Probe the Unicode tables of Hugging Face tokenizers.")
    parser.add_argument("--check", action="store_true", help="compare with the tables instead of writing them")
    args = parser.parse_args()
    if not args.check and tokenizers.__version__ != VERSION:
        sys.exit("this script writes the tables of tokenizers %s; installed is %s" % (VERSION, tokenizers.__version__))
    for name, probe in (("oniguruma.tsv", oniguruma), ("rust.tsv", rust), ("normalforms.tsv", normal_forms)):
        path, text = HERE / name, probe()
        if not args.check:
            path.write_text(text, encoding="ascii")
        elif path.read_text(encoding="ascii") != text:
            sys.exit("%s: the results of tokenizers %s differ" % (name, tokenizers.__version__))
        print(
            name,
            len(text),
            "bytes, tokenizers",
            tokenizers.__version__,
            "python",
            sys.version.split()[0],
            "unicodedata",
            unicodedata.unidata_version,
        )


if __name__ == "__main__":
    main()
