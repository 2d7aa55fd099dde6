#!/usr/bin/env python3
"""Makes tokenizer.json files of published vocabularies, as transformers' converters make them.

The vocabularies come from packages on PyPI.

    conformance/vocabularies.py OUTPUT

    gpt2.json        GPT-2                    openai-whisper 20250625, gpt2.tiktoken
    llama3.json      Llama 3                  llama-models 0.3.0, llama3/tokenizer.model (with
                                              ignore_merges)
    llama4.json      Llama 4, o200k's split   llama-models 0.3.0, llama4/tokenizer.model
    qwen2.json       Qwen 2 to 3              dashscope 2.0.2, qwen.tiktoken (with NFC)
    tekken.json      Mistral's Tekken         mistral-common 1.13.1, tekken_240911.json
    mistral-v1.json  Mistral 7B               mistral-common 1.13.1, tokenizer.model.v1:
                                              SentencePiece BPE with byte fallback
    llama2.json      Llama 2                  llama-cpp-python 0.3.36, ggml-vocab-llama-spm.gguf
    gemma4.json      Gemma 4                  the same, ggml-vocab-gemma-4.gguf
    xlm-r.json       XLM-RoBERTa, a Unigram   the same, ggml-vocab-nomic-bert-moe.gguf
    bert.json        BERT uncased, WordPiece  the same, ggml-vocab-bert-bge.gguf

The files are for comparisons (conformance/ids.py). Do not commit them. They have only some of the
published special tokens, enough to test how these are treated. Needs pip, tokenizers, sentencepiece
and protobuf.
"""

import argparse, base64, json, pathlib, subprocess, sys, tarfile, tempfile, zipfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import gguf

PACKAGES = ["openai-whisper==20250625", "llama-models==0.3.0", "dashscope==2.0.2", "mistral-common==1.13.1"]

GGUF = ("llama-spm", "gemma-4", "nomic-bert-moe", "bert-bge")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def download(folder):
    """Returns a function that returns the bytes of the only packaged file with a path suffix."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "-d", folder, *PACKAGES],
        check=True,
    )
    # This package is only a source archive, and pip builds its description.
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "llama-cpp-python==0.3.36"],
        check=True,
    )
    archives = sorted(pathlib.Path(folder).iterdir())

    def read(ending):
        for path in archives:
            if path.suffix == ".whl":
                with zipfile.ZipFile(path) as z:
                    for name in sorted(z.namelist()):
                        if name.endswith(ending):
                            return z.read(name)
            else:
                with tarfile.open(path) as t:
                    for name in sorted(t.getnames()):
                        if name.endswith(ending):
                            return t.extractfile(name).read()
        raise SystemExit(f"no package has a file {ending}")

    return read


def alphabet():
    """Returns the characters that represent bytes in a tokenizer.json."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


ALPHABET = alphabet()


def spelled(token):
    return "".join(ALPHABET[b] for b in token)


def tiktoken_ranks(data):
    """Returns tokens and ranks of a .tiktoken file: lines of base64 and a number."""
    pairs = (line.split() for line in data.splitlines() if line.strip())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def last_merge(ranks, token):
    """Returns the two parts that earlier merges leave of a token, or None if they are not two."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = ranks[token], None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], best)
            if rank < best:
                best, at = rank, i
        if at is None:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def byte_level(path, ranks, pattern, specials, ignore_merges=False, every_cut=False, normalizer=None):
    """Writes a byte-level BPE with these tokens.

    It has one merge for each token, as in files made from a merges.txt, or one merge for every
    split of a token into two, as transformers writes them for vocabularies with only ranks.
    """
    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.get):
        if every_cut:
            cuts = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ranks and token[k:] in ranks]
            merges += [(spelled(a), spelled(b)) for a, b in sorted(cuts, key=lambda c: (ranks[c[0]], ranks[c[1]]))]
        elif (parts := last_merge(ranks, token)) is not None:
            merges.append((spelled(parts[0]), spelled(parts[1])))
    tokenizer = Tokenizer(models.BPE({spelled(t): r for t, r in ranks.items()}, merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in specials])
    tokenizer.save(str(path))
    print(f"{path}: {tokenizer.get_vocab_size():,} ids, {len(merges):,} merges")


def pieces_of(model):
    """Returns tokens and scores of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    return [(p.piece, p.score) for p in proto.pieces]


def sentencepiece_bpe(path, pieces):
    """Writes the BPE of a SentencePiece model, with the other steps of Llama's and Mistral's files.
    """
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        cuts = [c for c in cuts if c[0] in vocabulary and c[1] in vocabulary]
        merges += [(score, c) for c in sorted(cuts, key=lambda c: (vocabulary[c[0]], vocabulary[c[1]]))]
    merges.sort(key=lambda m: -m[0])
    tokenizer = byte_fallback_bpe(vocabulary, [m[1] for m in merges], ["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    save(tokenizer, path, merges)


def gemma(path, data):
    tokens, _, kinds, fields = gguf.vocabulary(data)
    merges = [tuple(merge.decode().split(" ")) for merge in fields["merges"]]
    special = [t for t, kind in zip(tokens, kinds) if kind == 3]
    tokenizer = byte_fallback_bpe({t: i for i, t in enumerate(tokens)}, merges, special)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    save(tokenizer, path, merges)


def byte_fallback_bpe(vocabulary, merges, special):
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    return tokenizer


def xlm_roberta(path, data):
    tokens, scores, _, fields = gguf.vocabulary(data)
    vocabulary = list(zip(tokens, scores))[:250001] + [("<mask>", 0.0)]  # nomic's padding follows
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True, lstrip=s == "<mask>") for s in special])
    charsmap = bytes(x & 0xFF for x in fields["precompiled_charsmap"])
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    save(tokenizer, path)


def bert(path, data):
    vocabulary = {}
    for i, token in enumerate(gguf.vocabulary(data)[0]):
        # llama.cpp marks tokens at the start of words, where BERT marks all other tokens.
        special = token.startswith("[") and token.endswith("]")
        vocabulary[token if special else token[1:] if token.startswith("▁") else "##" + token] = i
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    save(tokenizer, path)


def save(tokenizer, path, merges=()):
    tokenizer.save(str(path))
    print(f"{path}: {tokenizer.get_vocab_size():,} ids, {len(merges):,} merges")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        read = download(folder)
        gpt2 = tiktoken_ranks(read("whisper/assets/gpt2.tiktoken"))
        llama3 = tiktoken_ranks(read("llama_models/llama3/tokenizer.model"))
        llama4 = tiktoken_ranks(read("llama_models/llama4/tokenizer.model"))
        qwen = tiktoken_ranks(read("dashscope/resources/qwen.tiktoken"))
        tekken = json.loads(read("mistral_common/data/tekken_240911.json"))
        mistral = read("mistral_common/data/tokenizer.model.v1")
        models_of = {name: read(f"ggml-vocab-{name}.gguf") for name in GGUF}
    byte_level(output / "gpt2.json", gpt2, None, ["<|endoftext|>"])
    byte_level(
        output / "llama3.json",
        llama3,
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        ignore_merges=True,
        every_cut=True,
    )
    byte_level(
        output / "llama4.json", llama4, O200K, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot|>"], every_cut=True
    )
    byte_level(
        output / "qwen2.json", qwen, QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC()
    )
    config = tekken["config"]
    known = tekken["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]
    byte_level(
        output / "tekken.json",
        {base64.b64decode(v["token_bytes"]): v["rank"] for v in known},
        config["pattern"],
        ["<unk>", "<s>", "</s>"],
        ignore_merges=True,
        every_cut=True,
    )
    sentencepiece_bpe(output / "mistral-v1.json", pieces_of(mistral))
    tokens, scores, _, _ = gguf.vocabulary(models_of["llama-spm"])
    sentencepiece_bpe(output / "llama2.json", list(zip(tokens, scores)))
    gemma(output / "gemma4.json", models_of["gemma-4"])
    xlm_roberta(output / "xlm-r.json", models_of["nomic-bert-moe"])
    bert(output / "bert.json", models_of["bert-bge"])


main()
