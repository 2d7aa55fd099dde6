#!/usr/bin/env bash
# Runs examples/ray, and the recipe for Ray Train of docs/guides/python-trainers.md, in a Ray of
# four nodes on this machine. A node that trains is killed, and a job is stopped and started again.
# Shards and weights are compared with the output of commands that ran alone.
#
#     conformance/ray.sh ENVIRONMENT      a folder of environments.sh with ray; needs bin/mula
set -euo pipefail
environment=$(cd "${1:?"usage: ray.sh ENVIRONMENT"}" && pwd)
cd "$(dirname "$0")/.."
root=$PWD
data=$(mktemp -d /tmp/ray-XXXXXX) # short, because Ray has sockets there
export PATH=$root/bin:$environment/bin:$PATH
# A token for all nodes. Without the first variable the head may ask for the token that it finds in
# the home directory, and not send it.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_JOB_STOP_WAIT_TIME_S=300 RAY_DISABLE_IMPORT_WARNING=1 RAY_USAGE_STATS_ENABLED=0
head=127.0.0.20
free() { python -c "import socket; print(socket.create_server(('$head', 0)).getsockname()[1])"; }
port=$(free) dashboard=$(free)

say() { printf '== ray: %s (%d s)\n' "$*" "$SECONDS"; }
processes() { pgrep -f -- "$1" || true; } # processes PATTERN: ids of the processes whose command matches
cluster() { processes "$data"; } # the command lines of all processes of Ray have it, this shell's does not
source conformance/cluster.bash
submit() { # submit NAME ARGUMENTS…: runs a job to its end
	local name=$1
	shift
	ray job submit --submission-id "$name" --address "http://$head:$dashboard" --working-dir examples/ray -- python "$@" >"$data/$name.log" 2>&1
}

say "data, and the run without Ray"
mkdir "$data/files"
files=$data/files
python - "$files" <<'END'
import json, random, sys
r = random.Random(1)
words = "the of and to in a is that it was for on are as with his they at be this have from".split()
with open(sys.argv[1] + "/text.jsonl", "w") as f:
    for i in range(400):
        f.write(json.dumps({"id": str(i), "text": " ".join(r.choice(words) for _ in range(80)) + "\n"}) + "\n")
END
(
	cd "$files"
	cat >blend.yaml <<'END'
sequence_length: 32
validation: 0.1
sources: [{name: web, shards: [alone/web]}]
END
	cat >train.yaml <<'END'
plan: plan.json
tokenizer: tokenizer.json
batch_size: 4
model: {preset: mula-nano}
steps: 60
layout: {expert_dp: 2}
schedule: {learning_rate: 0.01, warmup_steps: 2}
checkpoint: {every: 10}
END
	mula tokenizer train --vocab-size 300 --output tokenizer.json text.jsonl
	mula tokenize --tokenizer tokenizer.json --output alone/web text.jsonl
	mula blend
	mula launch -- train --set output=alone/run
) >"$data/alone.log" 2>&1

say "a Ray of four nodes"
ray start --head --node-ip-address=$head --port=$port --num-cpus=0 --dashboard-host=$head --dashboard-port=$dashboard --temp-dir="$data/ray" >"$data/ray.log" 2>&1
for node in 1 2 3; do
	ray start --address=$head:$port --node-ip-address=127.0.0.2$node --num-cpus=1 >>"$data/ray.log" 2>&1
done
# Ray refuses jobs until one of its agents has started.
wait_for 300 ray job submit --address "http://$head:$dashboard" -- true >>"$data/ray.log" 2>&1

say "tokens.py, 3 tasks"
submit tokens tokens.py --tasks 3 --directory "$files" --tokenizer tokenizer.json --output shards/web text.jsonl
for file in bin idx; do cmp "$files/alone/web.$file" "$files/shards/web.$file"; done

# weights OUTPUT: their hash, as the run prints it
weights() { grep -h '^weights' "$1" | tail -n 1; }
train() { submit "$1" train.py --hosts 2 --spares 1 --directory "$files" --set "output=$2"; }
saved() { ls -d "$files/$1/checkpoints/step-00000020" >/dev/null 2>&1; }

say "train.py, a node is killed after 20 steps"
train killed killed &
job=$!
wait_for 300 saved killed
node=$(pgrep -af 'shell\.py 127\.' | grep -o '127\.0\.0\.2[123]' | head -n 1) # a node with a rank
kill -KILL $(processes "--node.ip.address=$node ") # of Ray; the rank ends with its standard input
wait $job
grep -q "\"blamed\":\"$node\"" "$files/killed/launch.jsonl"
[ "$(weights "$data/killed.log")" = "$(weights "$data/alone.log")" ]
say "$node was replaced, the weights are equal"

say "train.py, stopped after 20 steps and started again"
ray start --address=$head:$port --node-ip-address="$node" --num-cpus=1 >>"$data/ray.log" 2>&1
train stopped stopped &
job=$!
wait_for 300 saved stopped
ray job stop --address "http://$head:$dashboard" stopped >"$data/stop.log" 2>&1
wait $job || true # the job was stopped
train again stopped
[ "$(weights "$data/again.log")" = "$(weights "$data/alone.log")" ]
attempts=$(grep -c '"outcome":"\(stopped\|evicted\)"' "$files/stopped/launch.jsonl")
[ "$attempts" = 1 ]

say "the recipe for Ray Train"
(cd clients/python && MULA=$root/bin/mula python -m pytest -q -k ray tests/test_recipes.py)
say "all equal"
