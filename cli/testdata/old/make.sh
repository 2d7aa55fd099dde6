#!/usr/bin/env bash
# make.sh MULA writes the files of this folder with MULA, the program built at commit 6cbb29a:
#
#     git worktree add /tmp/old 6cbb29a && (cd /tmp/old && go build -o /tmp/old-mula ./cli/mula)
#     cli/testdata/old/make.sh /tmp/old-mula
#
# cli/old_test.go reads them with the current program.
set -euo pipefail
mula=$(realpath "$1")
cd "$(dirname "$0")"
rm -rf corpus.jsonl tokenizer.json shards killed run plan.json expected.jsonl blend.yaml train.yaml
python3 - <<'PYTHON'
import json, random
draw = random.Random(1)
words = "the of and to in a is that it was for on are as with his they at be this".split()
with open("corpus.jsonl", "w") as f:
    for i in range(30):
        f.write(json.dumps({"id": f"a-{i}", "text": " ".join(draw.choice(words) for _ in range(20 + draw.randrange(30))) + "\n"}) + "\n")
PYTHON
cat > blend.yaml <<'YAML'
sequence_length: 16
seed: 1
validation: 0.1
sources: [{name: a, shards: [shards/a.idx]}]
YAML
cat > train.yaml <<'YAML'
plan: plan.json
output: run
model: {preset: mula-nano, num_hidden_layers: 1, hidden_size: 8, intermediate_size: 8, num_attention_heads: 2, num_key_value_heads: 2, num_experts: 2, num_experts_per_tok: 1, max_position_embeddings: 32}
batch_size: 4
steps: 2
threads: 1
schedule: {learning_rate: 3e-3, warmup_steps: 1, decay_steps: 4}
checkpoint: {every: 2}
YAML
export XDG_CACHE_HOME; XDG_CACHE_HOME=$(mktemp -d); trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
"$mula" tokenizer train --vocab-size 280 --output tokenizer.json corpus.jsonl
"$mula" tokenize --tokenizer tokenizer.json --output shards/a corpus.jsonl
for layout in dolma datatrove mds fms; do
    "$mula" convert --to $layout --output shards/$layout/a shards/a
done
"$mula" blend --config blend.yaml --output plan.json
"$mula" hash --plan plan.json --batch-size 4 --output expected.jsonl
"$mula" train --config train.yaml
rm -r run/tensorboard run/.lock
# A job that was killed before it had finished a unit has its description alone.
mkdir -p killed/a.job
"$mula" tokenize --tokenizer tokenizer.json --output killed/a corpus.jsonl
find killed -type f ! -name job.json -delete
