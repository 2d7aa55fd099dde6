"""Writes pipelines.json: tokenizers of every kind and their results for some documents.

Package tokenize's tests compare with these results of Hugging Face tokenizers.

    pip install tokenizers==0.23.3
    python pipelines.py
    python pipelines.py --files DIR   # writes each case's tokenizer.json to DIR

conformance/ids.py compares the files of --files on more texts. The library trains the models on
text.txt, with a few hundred tokens each. A case is a model, which several cases share, with the
other parts of a tokenizer.json. For each case pipelines.json has:

- the ids of the documents with special tokens as text and without the post-processor's tokens
- the ids with special tokens as tokens and the post-processor's tokens (null if equal)
- the text that the library decodes from the latter (null if it is the document)

It also has numbers as the library parses scores, results of a Precompiled normalizer for many kinds
of grapheme clusters, and the text that the library decodes from bytes.
"""

import argparse
import json
import pathlib
import random
import sys

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tables"), str(HERE.parents[1] / "conformance")]
from graphemes import charsmap  # noqa: E402
from texts import PIECES, nasty  # noqa: E402

VERSION = "0.23.3"
BYTES = ["<0x%02X>" % b for b in range(256)]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
    r"?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# A small version of SentencePiece's map nmt_nfkc: compatibility forms, blanks, removed characters,
# and a mark that joins a letter.
CHARSMAP = {
    "\u0001": "",
    "\t": " ",
    "\n": " ",
    "\r": " ",
    "\u00a0": " ",
    "\u3000": " ",
    "\u2003": " ",
    "\u200b": "",
    "\ufeff": "",
    "\uff21": "A",
    "\u2460": "1",
    "\ufb01": "fi",
    "e\u0301": "\u00e9",
    "a\u030a": "\u00e5",
    "\u00bd": "1\u20442",
    "\u2126": "\u03a9",
    "\u1100\u1161": "\uac00",
    "\u00ad": "",
    "\u0600": "(",
    "\u2122": "TM",
    "\u0958": "\u0915\u093c",
    "\u0915": "\u0916",
    "\u00a9": "(c)",
    "\u2603": "*",
    "\u200d": "",
    "\U0001f600": ":)",
    "`": "\u0300",
    "\u1161": "A",
}


def step(x):
    return None if x is None else json.loads(x.__getstate__())


def token(id, content, **options):
    a = dict(id=id, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    a.update(options)
    return a


def train(model, trainer, texts, pre=None, normalizer=None):
    t = Tokenizer(model)
    if pre is not None:
        t.pre_tokenizer = pre
    if normalizer is not None:
        t.normalizer = normalizer
    t.train_from_iterator(texts, trainer)
    return json.loads(t.to_str())["model"]


def make_models(texts):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    quiet = dict(show_progress=False)
    m = {}
    m["bytes"] = train(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, **quiet),
        texts,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    m["bytes"]["merges"] = [" ".join(x) for x in m["bytes"]["merges"]]
    # Tokens that merging does not produce, which test ignore_merges.
    whole = m["ignore"] = json.loads(json.dumps(m["bytes"]))
    for word in (
        "\u0120formula",
        "\u0120document",
        "style",
        "\u0120wordabcdefghijklmnopqrstuvwxyz",
        "\u00c3\u0127ll",
        "123",
    ):
        if word not in whole["vocab"]:
            whole["vocab"][word] = len(whole["vocab"])
    whole["ignore_merges"] = True
    sp = ["<unk>", "<s>", "</s>"]
    some = [t for t in texts if t.isascii()][: len(texts) // 3] + texts[:40]
    m["sentencepiece"] = train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer(vocab_size=480, special_tokens=sp + BYTES, limit_alphabet=90, **quiet),
        some,
        pre_tokenizers.Metaspace(),
    )
    # Tokens of several words and merges across them, as some multilingual vocabularies have.
    m["across"] = train(
        models.BPE(unk_token="<unk>", fuse_unk=False),
        trainers.BpeTrainer(vocab_size=260, special_tokens=sp, limit_alphabet=70, **quiet),
        some,
        pre_tokenizers.Metaspace(split=False),
    )
    m["suffix"] = train(
        models.BPE(unk_token="<|endoftext|>", end_of_word_suffix="</w>"),
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<|startoftext|>", "<|endoftext|>"],
            end_of_word_suffix="</w>",
            limit_alphabet=80,
            **quiet,
        ),
        some,
        pre_tokenizers.Split(Regex(CLIP), behavior="removed", invert=True),
        normalizers.Lowercase(),
    )
    m["prefix"] = train(
        models.BPE(unk_token="[UNK]", continuing_subword_prefix="##"),
        trainers.BpeTrainer(
            vocab_size=360, special_tokens=["[UNK]"], continuing_subword_prefix="##", limit_alphabet=60, **quiet
        ),
        some,
        pre_tokenizers.Whitespace(),
    )
    for i, b in enumerate(BYTES[:200]):  # some bytes only
        m["prefix"]["vocab"][b] = len(m["prefix"]["vocab"])
    m["wordpiece"] = train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(
            vocab_size=420, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], limit_alphabet=120, **quiet
        ),
        texts,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    )
    m["wordlevel"] = train(
        models.WordLevel(unk_token="[UNK]"),
        trainers.WordLevelTrainer(vocab_size=300, special_tokens=["[UNK]", "[PAD]"], **quiet),
        texts,
        pre_tokenizers.Whitespace(),
    )
    m["unigram"] = train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", **quiet),
        some,
        pre_tokenizers.Metaspace(),
    )
    bytewise = m["unigram bytes"] = json.loads(json.dumps(m["unigram"]))
    bytewise["byte_fallback"] = True
    bytewise["vocab"] += [[b, 0.0] for b in BYTES] + [["the", -3.25], ["\u2581\u2581", -7.123456789012345678]]
    for model in m.values():
        model.pop("dropout", None)
    return m


def make_cases(m):
    """Returns the cases by name: model, added tokens, and the other parts."""
    cases = {}
    n = {name: len(model["vocab"]) for name, model in m.items()}

    def case(name, model, added=(), normalizer=None, pre=None, post=None, decoder=None):
        cases[name] = dict(
            model=model,
            added_tokens=list(added),
            normalizer=step(normalizer),
            pre_tokenizer=step(pre),
            post_processor=step(post),
            decoder=step(decoder),
        )

    def template(single, **ids):
        return processors.TemplateProcessing(single=single, special_tokens=[(t, i) for t, i in ids.items()])

    def specials(start, *contents, **options):
        return [token(start + i, c, special=True, **options) for i, c in enumerate(contents)]

    B = pre_tokenizers.ByteLevel
    level, level_decoder = B(add_prefix_space=False, use_regex=False), decoders.ByteLevel()

    def cut(regex):
        return pre_tokenizers.Split(Regex(regex), "isolated")

    # Byte-level BPEs
    k = n["ignore"]
    case(
        "llama3",
        "ignore",
        specials(k, "<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>", "<|eot_id|>"),
        None,
        pre_tokenizers.Sequence([cut(LLAMA3), level]),
        processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|begin_of_text|> $A",
                    pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                    special_tokens=[("<|begin_of_text|>", k)],
                ),
            ]
        ),
        level_decoder,
    )
    k = n["bytes"]
    case(
        "qwen2",
        "bytes",
        specials(k, "<|endoftext|>", "<|im_start|>", "<|im_end|>") + [token(k + 3, "<tool_call>")],
        normalizers.NFC(),
        pre_tokenizers.Sequence([cut(QWEN2), level]),
        processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        level_decoder,
    )
    case(
        "deepseek",
        "bytes",
        specials(k, "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<|endoftext|>", "<|im_start|>")
        + [token(k + 3, "<think>", normalized=True)],
        normalizers.Sequence([]),
        pre_tokenizers.Sequence([cut(r) for r in DEEPSEEK] + [level]),
        template("<\uff5cbegin\u2581of\u2581sentence\uff5c> $A", **{"<\uff5cbegin\u2581of\u2581sentence\uff5c>": k}),
        level_decoder,
    )
    case(
        "falcon",
        "bytes",
        specials(k, ">>TITLE<<", "<|endoftext|>"),
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                B(add_prefix_space=False),
                pre_tokenizers.Digits(False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
        None,
        level_decoder,
    )
    case(
        "starcoder",
        "bytes",
        specials(k, "<|endoftext|>", "<fim_prefix>"),
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), B(add_prefix_space=False)]),
        None,
        level_decoder,
    )
    case(
        "roberta",
        "bytes",
        specials(k, "<s>", "</s>", "<|endoftext|>", normalized=True)
        + [token(k + 3, "<mask>", lstrip=True, special=True)],
        None,
        B(add_prefix_space=True),
        processors.RobertaProcessing(("</s>", k + 1), ("<s>", k)),
        level_decoder,
    )
    case(
        "roberta as is",
        "bytes",
        specials(k, "<s>", "</s>", "<|endoftext|>", normalized=True)
        + [
            token(k + 3, "<mask>", lstrip=True, rstrip=True, special=True),
            token(k + 4, "  ", rstrip=True),
            token(k + 5, "don", single_word=True, rstrip=True),
            token(k + 6, "123", single_word=True, lstrip=True, normalized=True),
        ],
        None,
        B(add_prefix_space=False),
        processors.RobertaProcessing(("</s>", k + 1), ("<s>", k)),
        level_decoder,
    )
    case(
        "bytes by normalizer",
        "bytes",
        specials(k, "<|endoftext|>")
        + [token(k + 1, "caf\u00e9", normalized=True), token(k + 2, " \u4f60", normalized=False)],
        normalizers.Sequence([normalizers.NFC(), normalizers.ByteLevel()]),
        pre_tokenizers.Split(Regex("\u0120?[a-zA-Z\u00c0-\u017f]+|[0-9]"), "isolated"),
        None,
        level_decoder,
    )
    case("whole text", "bytes", specials(k, "<|endoftext|>"), normalizers.Prepend(" "), level, None, level_decoder)

    # BPEs over characters
    sp = [token(0, "<unk>", special=True), token(1, "<s>", special=True), token(2, "</s>", special=True)]
    k = n["sentencepiece"]
    case(
        "llama2",
        "sentencepiece",
        sp,
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        None,
        template("<s> $A", **{"<s>": 1}),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    case(
        "llama2 first",
        "sentencepiece",
        sp + [token(k, "<|endoftext|>", special=True), token(k + 1, "don", normalized=True)],
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        template("<s> $A </s>", **{"<s>": 1, "</s>": 2}),
        decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    case(
        "gemma",
        "sentencepiece",
        sp
        + [
            token(k, "<|endoftext|>", special=True),
            token(k + 1, "\n\n"),
            token(k + 2, "\u2581\u2581\u2581", normalized=True),
        ],
        normalizers.Replace(" ", "\u2581"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        template("<s> $A", **{"<s>": 1}),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    case(
        "first after removing",
        "sentencepiece",
        sp + [token(k, "don", normalized=True)],
        normalizers.Sequence(
            [normalizers.Nmt(), normalizers.Strip(True, False), normalizers.Replace("\u00e9", "ee"), normalizers.NFKD()]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace(prepend_scheme="first")]),
        None,
        decoders.Metaspace(prepend_scheme="first"),
    )
    case(
        "across",
        "across",
        sp,
        normalizers.Sequence([normalizers.Replace(" ", "\u2581")]),
        None,
        None,
        decoders.Metaspace(prepend_scheme="never"),
    )
    case(
        "no decoder",
        "across",
        sp,
        None,
        pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=True),
        None,
        None,
    )
    case(
        "clip",
        "suffix",
        specials(0, "<|startoftext|>", "<|endoftext|>"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLIP), "removed", True)]),
        processors.RobertaProcessing(
            ("<|endoftext|>", 1), ("<|startoftext|>", 0), trim_offsets=False, add_prefix_space=False
        ),
        decoders.BPEDecoder(),
    )
    case(
        "prefix",
        "prefix",
        specials(0, "[UNK]"),
        normalizers.NFKC(),
        pre_tokenizers.Whitespace(),
        None,
        decoders.WordPiece(),
    )
    m["prefix bytes"] = dict(m["prefix"], byte_fallback=True, fuse_unk=True)
    case(
        "prefix bytes",
        "prefix bytes",
        specials(0, "[UNK]"),
        None,
        pre_tokenizers.WhitespaceSplit(),
        None,
        decoders.Sequence([decoders.ByteFallback(), decoders.WordPiece(cleanup=False)]),
    )

    # WordPiece and WordLevel
    bert = [token(i, c, special=True) for i, c in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))]
    case(
        "bert uncased",
        "wordpiece",
        bert,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        template("[CLS] $A [SEP]", **{"[CLS]": 2, "[SEP]": 3}),
        decoders.WordPiece(),
    )
    case(
        "bert cased",
        "wordpiece",
        bert,
        normalizers.BertNormalizer(lowercase=False),
        pre_tokenizers.BertPreTokenizer(),
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        decoders.WordPiece(cleanup=False),
    )
    case(
        "bert odd",
        "wordpiece",
        bert,
        normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous")]),
        None,
        decoders.WordPiece(prefix="##"),
    )
    m["short words"] = dict(m["wordpiece"], max_input_chars_per_word=4)
    case(
        "short words",
        "short words",
        bert,
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        pre_tokenizers.Whitespace(),
        processors.Sequence([template("[CLS] $A [SEP]", **{"[CLS]": 2, "[SEP]": 3}), processors.ByteLevel()]),
        decoders.CTC(pad_token="[PAD]", word_delimiter_token="##"),
    )
    level_tokens = [token(0, "[UNK]", special=True), token(1, "[PAD]", special=True)]
    for name, pre in {
        "whitespace": pre_tokenizers.Whitespace(),
        "whitespace split": pre_tokenizers.WhitespaceSplit(),
        "delimiter": pre_tokenizers.CharDelimiterSplit("e"),
        "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.WhitespaceSplit()]),
        "scripts": pre_tokenizers.UnicodeScripts(),
        "fixed length": pre_tokenizers.FixedLength(3),
    }.items():
        case("words by " + name, "wordlevel", level_tokens, None, pre, None, decoders.WordPiece(prefix=""))
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            pre = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\p{P}|\s|[0-9]+"), behavior, invert),
                    pre_tokenizers.Split("e", behavior, invert),
                ]
            )
            case(
                "words split %s%s" % (behavior, " inverted" if invert else ""),
                "wordlevel",
                level_tokens,
                None,
                pre,
                None,
                decoders.Fuse(),
            )
        case(
            "words by punctuation %s" % behavior,
            "wordlevel",
            level_tokens,
            None,
            pre_tokenizers.Punctuation(behavior),
            None,
            decoders.Replace(Regex("[a-e]"), "_"),
        )
    case(
        "single characters",
        "wordlevel",
        level_tokens,
        None,
        pre_tokenizers.Split("", "isolated"),
        None,
        decoders.Sequence([]),
    )
    case(
        "empty matches",
        "wordlevel",
        level_tokens,
        None,
        pre_tokenizers.Split(Regex(r"\s*"), "merged_with_next"),
        None,
        decoders.Strip("e", 1, 0),
    )

    # Unigram
    m_charsmap = normalizers.Precompiled(charsmap(CHARSMAP))
    t5 = [token(0, "<pad>", special=True), token(1, "</s>", special=True), token(2, "<unk>", special=True)]
    k = n["unigram"]
    case(
        "t5",
        "unigram",
        t5 + specials(k, "<extra_id_0>", "<|endoftext|>", lstrip=True, rstrip=True),
        normalizers.Sequence([m_charsmap, normalizers.Replace(Regex(" {2,}"), "\u2581")]),
        pre_tokenizers.Metaspace(),
        template("$A </s>", **{"</s>": 1}),
        decoders.Metaspace(),
    )
    case(
        "xlm-r",
        "unigram",
        t5 + [token(k, "<mask>", lstrip=True, special=True)],
        m_charsmap,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        template("</s> $A </s>", **{"</s>": 1}),
        decoders.Metaspace(),
    )
    case(
        "charsmap first",
        "unigram",
        t5 + [token(k, "Word", normalized=True, single_word=True)],
        m_charsmap,
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        None,
        decoders.Metaspace(prepend_scheme="first"),
    )
    case(
        "unigram whole text",
        "unigram bytes",
        t5,
        normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(" ", "\u2581")]),
        None,
        None,
        decoders.Sequence(
            [
                decoders.ByteFallback(),
                decoders.Metaspace(prepend_scheme="always"),
                decoders.Strip("t", 2, 0),
                decoders.Fuse(),
            ]
        ),
    )
    case(
        "unigram lower",
        "unigram bytes",
        t5 + [token(len(m["unigram bytes"]["vocab"]), "The Word", normalized=True)],
        normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip(True, True)]),
        pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
        None,
        decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
    )
    return cases


def file_of(m, c):
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        **{k: c[k] for k in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")},
        model=m[c["model"]],
    )


EXTRA = [
    "",
    " ",
    "a",
    "  a  b",
    "The cat's style, don't! <mask> it <mask>x",
    "x<s>y</s> z",
    " <s> ",
    "don don123 123 don-123 adon",
    "\u0001\u0002 \u200bA",
    "\u0001don",
    "\u00e9t\u00e9 \u00c9T\u00c9 caf\u00e9 cafe\u0301 \u4f60 \u4f60\u597d",
    "e\u0301\u0301 a\u030aa e\u0301\u0300b \u0600a \u0600e\u0301",
    "\r\n\r\n \r\u0301\n",
    "\u2460\u0301\u24601 \ufb01ne \uff21\u0327 \u00bd",
    "\u1100\u1161\u11a8 \u0915\u094d\u0937\u0301 \u0915\u0301",
    "\u00a9\u200d\u2603\u0301 \u00a9\u200d \u00a9\u0301x \u2122\u200d\u2122",
    "\u4f60\u597d, world! \u3053\u3093\u306b\u3061\u306f\u30fc \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627",
    "1234567 \u0661\u0662\u0663 \u00bd\u00be \u2167",
    "\u2581the\u2581\u2581 cat\u2581",
    "<0x41><0x0A> [UNK] <unk><unk>x",
    "[CLS] a [SEP] [MASK]",
    "<|begin_of_text|>Hi<|eot_id|>\n\nyou<|endoftext|>",
    "<extra_id_0> the  <extra_id_0>",
    "The Word the word THE WORD Word words",
    "\u0130stanbul \u01c5 \u03a3\u03b1\u03c2 \u1e9e\u00df",
    "Hello\u00a0\u3000\u2003world\t\n  tab",
    "don do not n't 's ' \" . , ! ? 've 're 'm",
    "formula document wordabcdefghijklmnopqrstuvwxyz style 123",
    "a" * 120,
    "ab" * 60 + " x",
    " " * 40 + "y",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f600",
    "A\u0301\u0323 \u1ea4 \u0b47\u0b3e \u0958",
    "\u0903\u093e \u20dd\u0488",
    "\ue000\U000f0000\U0010ffff\ufffd\ufffe",
    "<tool_call>{}</tool_call> <think>\n",
    ">>TITLE<< 12345 ...!!!",
]


def documents(r, texts, count):
    return EXTRA + PIECES[::5] + [nasty(r, texts) for _ in range(count)]


def make_scores(r):
    """Returns numbers and the library's parsed values: some are not the nearest float."""
    texts = [
        "0",
        "-0.0",
        "1e-400",
        "-5",
        "18446744073709551616",
        "123456789012345678901234567890.5",
        "0.1",
        "1E2",
        "-2.5e+3",
    ]
    texts += (
        ["%.17g" % (-20 * r.random()) for _ in range(30)]
        + ["%.25f" % (-20 * r.random()) for _ in range(10)]
        + ["%.17e" % (r.random() * 10 ** r.randint(-300, 300)) for _ in range(20)]
    )
    vocab = ",".join('["%d",%s]' % (i, t) for i, t in enumerate(texts))
    t = Tokenizer.from_str(
        '{"version":"1.0","added_tokens":[],"model":{"type":"Unigram","unk_id":0,"vocab":[%s]}}' % vocab
    )
    return [
        [text, "%.17g" % score]
        for text, (_, score) in zip(texts, json.loads(t.to_str())["model"]["vocab"], strict=True)
    ]


def make_clusters(r):
    """Returns a charsmap, and texts of grapheme clusters before and after it."""
    parts = (
        "a e\u00e9\r\n\t\u0301\u0300\u0600\u06dd\u0903\u0915\u094d\u0937\u093c"
        "\u1100\u1161\u11a8\uac00\uac01\u00a9\u2603\u200d\u200c\u00ad\u200b\U0001f468\U0001f1e9\ufe0f\u0e33\u1b44\u1b13\U000110bd\U00011f02\0"
    )
    m = charsmap(
        {c: "!" for c in parts if c not in "a\0"}
        | {"e\u0301": "E", "a\u0301": "A", "\r\n": "N", "\u00a9\u200d": "", "\u06dd": ""}
    )
    n = normalizers.Precompiled(m)
    texts = ["".join(r.choices(parts, k=r.randint(1, 9))) for _ in range(400)]
    return json.loads(n.__getstate__())["precompiled_charsmap"], [[t, n.normalize_str(t)] for t in texts]


def make_lossy(r):
    """Bytes, in hexadecimal, and the text that the ByteLevel decoder makes of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = {}
    rest = 256
    for b in range(256):
        if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174:
            spelling[b] = chr(b)
        else:
            spelling[b] = chr(rest)
            rest += 1
    assert sorted(spelling.values()) == alphabet
    some = [
        0x41,
        0x80,
        0x9F,
        0xA0,
        0x8F,
        0x90,
        0xBF,
        0xC0,
        0xC2,
        0xC3,
        0xE0,
        0xE2,
        0xED,
        0xEF,
        0xF0,
        0xF1,
        0xF4,
        0xF5,
        0xFF,
    ]
    all = [bytes(r.choices(some, k=r.randint(1, 6))) for _ in range(150)]
    return [[b.hex(), decoders.ByteLevel().decode(["".join(spelling[c] for c in b)])] for b in all]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--files", type=pathlib.Path)
    args = p.parse_args()
    assert tokenizers.__version__ == VERSION, tokenizers.__version__
    text = (HERE / "text.txt").read_text()
    texts = [t for t in text.split("\n") if t]
    golden = HERE / "pipelines.json"
    if args.files:
        made = json.loads(golden.read_text())
        args.files.mkdir(parents=True, exist_ok=True)
        for c in made["cases"]:
            (args.files / (c["name"].replace(" ", "_") + ".json")).write_text(json.dumps(file_of(made["models"], c)))
        return
    m = make_models(texts)
    cases = make_cases(m)
    docs = documents(random.Random(7), [text], 18)
    out = []
    for name, c in cases.items():
        t = Tokenizer.from_str(json.dumps(file_of(m, c)))
        t.encode_special_tokens = True
        plain = [t.encode(d, add_special_tokens=False).ids for d in docs]
        t.encode_special_tokens = False
        around = [t.encode(d, add_special_tokens=True).ids for d in docs]
        decoded = [t.decode(ids, skip_special_tokens=False) for ids in around]
        out.append(
            dict(
                name=name,
                **c,
                plain=plain,
                around=[None if a == b else a for a, b in zip(around, plain)],
                decoded=[None if a == b else a for a, b in zip(decoded, docs)],
            )
        )
    version = "tokenizers %s, python %s" % (tokenizers.__version__, sys.version.split()[0])
    r = random.Random(8)
    scores = make_scores(r)
    charsmap_of_clusters, clusters = make_clusters(r)
    rest = dict(scores=scores, charsmap=charsmap_of_clusters, clusters=clusters, lossy=make_lossy(r))
    golden.write_text(
        json.dumps(
            dict(versions=version, documents=docs, models=m, cases=out, **rest),
            ensure_ascii=False,
            separators=(",", ":"),
        )
    )
    print(version, len(docs), "documents", len(out), "cases", golden.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
