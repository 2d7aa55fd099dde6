#!/usr/bin/env python3
"""Compares mula with its peers on this machine: the same work, in turns, in one run. Prints the best and the median of each and their ratio.

    make build && make quickstart            # the corpus, tokenizer and plan that are measured on
    pip install tokenizers transformers torch pyarrow zstandard
    python benchmarks/compare.py quickstart [--rounds 5] [--threads 2]

tokenize   the quickstart's documents -> ids, decompression and JSON included on both sides; one thread each
           mula tokenize --workers 1                     (also writes the shard and its hashes)
           Hugging Face tokenizers, encode_batch_fast    (ids stay in memory)
train      steps of mula-tiny on batches of the quickstart's plan; forward, backward, clipping, AdamW; fp32
           mula train
           transformers' OlmoeForCausalLM with torch.optim.AdamW, eager attention replaced by sdpa, experts by its default implementation
"""
import argparse, gzip, io, json, os, pathlib, statistics, subprocess, sys, tempfile, time

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("quickstart", type=pathlib.Path)
ap.add_argument("--rounds", type=int, default=5)
ap.add_argument("--threads", type=int, default=os.cpu_count())
ap.add_argument("--only", choices=["tokenize", "train"])
args = ap.parse_args()
mula = str(pathlib.Path(__file__).parent.parent / "bin" / "mula")
corpus = sorted(p for p in (args.quickstart / "corpus").rglob("*") if p.is_file() and not p.name.startswith("."))


def documents():
    import zstandard
    for path in corpus:
        with open(path, "rb") as f:
            raw = gzip.open(f) if path.suffix == ".gz" else zstandard.ZstdDecompressor().stream_reader(f)
            for line in io.TextIOWrapper(raw, encoding="utf-8"):
                yield json.loads(line)["text"]


def report(name, unit, mine, theirs, peer):
    """mine and theirs: units per second, one number a round; more is better."""
    print(f"{name:10} {'best':>10} {'median':>10}")
    for label, runs in (("mula", mine), (peer, theirs)):
        print(f"  {label:40} {max(runs):10.2f} {statistics.median(runs):10.2f} {unit}")
    print(f"  {'ratio':40} {max(mine) / max(theirs):10.2f} {statistics.median(mine) / statistics.median(theirs):10.2f}\n")


def tokenize():
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import tokenizers
    tok = tokenizers.Tokenizer.from_file(str(args.quickstart / "tokenizer.json"))
    megabytes = sum(len(t.encode()) for t in documents()) / 1e6
    mine, theirs, ids = [], [], {}
    with tempfile.TemporaryDirectory() as tmp:
        for _ in range(args.rounds):
            t = time.perf_counter()
            out = subprocess.run([mula, "tokenize", "--tokenizer", args.quickstart / "tokenizer.json", "--workers", "1", "--specials", "tokens", "--no-eod",
                                  "--output", f"{tmp}/x", "--json", *corpus], check=True, capture_output=True, env={**os.environ, "GOMAXPROCS": "1"})
            mine.append(megabytes / (time.perf_counter() - t))
            ids["mula"] = json.loads(out.stdout)["tokens"]
            t = time.perf_counter()
            n, batch = 0, []
            def flush():
                return sum(len(e.ids) for e in tok.encode_batch_fast(batch, add_special_tokens=False))
            for text in documents():
                batch.append(text)
                if len(batch) == 256:
                    n += flush()
                    batch.clear()
            n += flush()
            theirs.append(megabytes / (time.perf_counter() - t))
            ids["peer"] = n
    assert ids["mula"] == ids["peer"], ids
    print(f"{megabytes:.1f} MB of text, {ids['mula']:,} ids on both sides")
    report("tokenize", "MB/s", mine, theirs, f"tokenizers {tokenizers.__version__}, one thread")


def train():
    import torch, transformers, pyarrow
    torch.set_num_threads(args.threads)
    rows, steps, warm = 16, 6, 2
    stream = subprocess.run([mula, "stream", "--plan", args.quickstart / "plan.json", "--batch-size", str(rows), "--to", str(rows * steps)],
                            check=True, capture_output=True).stdout
    batches = [torch.tensor(b.column("tokens").flatten().to_numpy().reshape(b.num_rows, -1).astype("int64"))
               for b in pyarrow.ipc.open_stream(stream)]
    length = batches[0].shape[1] - 1
    tokens = rows * length
    config = transformers.OlmoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        num_experts=16, num_experts_per_tok=4, max_position_embeddings=4096, pad_token_id=None, eos_token_id=0, output_router_logits=True,
        use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.OlmoeForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    assert total == 9_457_920, total
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def torch_step(batch):
        loss = model(input_ids=batch[:, :-1], labels=batch[:, 1:], shift_labels=batch[:, 1:].contiguous()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as tmp:
        for i in range(args.rounds):
            config_file = pathlib.Path(tmp) / "train.yaml"
            config_file.write_text(f"plan: {(args.quickstart / 'plan.json').resolve()}\noutput: run{i}\nmodel: {{preset: mula-tiny}}\n"
                                   f"batch_size: {rows}\nmicro_batch_size: {rows}\nsteps: {steps}\nthreads: {args.threads}\n"
                                   "checkpoint: {every: 0}\nevaluate: {every: 0}\n")
            subprocess.run([mula, "train", "--config", config_file], check=True, capture_output=True)
            lines = [json.loads(line) for line in open(f"{tmp}/run{i}/metrics.jsonl")]
            mine.append(statistics.median(l["tokens_per_second"] for l in lines if l.get("step", -1) >= warm and "seconds" in l))
            took = []
            for batch in batches:
                t = time.perf_counter()
                torch_step(batch)
                took.append(time.perf_counter() - t)
            theirs.append(tokens / statistics.median(took[warm:]))
    print(f"mula-tiny, {total:,} parameters, {rows} x {length} tokens a step, {args.threads} threads")
    report("train", "tokens/s", mine, theirs, f"torch {torch.__version__}, transformers {transformers.__version__}")


if args.only != "train":
    tokenize()
if args.only != "tokenize":
    train()
