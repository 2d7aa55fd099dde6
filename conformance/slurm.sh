#!/usr/bin/env bash
# Runs the templates of examples/slurm in a Slurm of four nodes on this machine: munged, slurmctld
# and four slurmd, on free ports, in a temporary folder. Jobs are ended before their time limit,
# requeued by hand, cancelled, and lose a node. Shards, index files and weights are compared with
# the output of commands that ran alone. It takes about two minutes.
#
#     conformance/slurm.sh                needs bin/mula, Go and python3
#
# Debian's packages slurm-wlm and munge are installed if they are missing and root runs the script.
# The exit code is 75 if Slurm cannot be installed, or does not start here.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export PATH=$root/bin:$PATH:/usr/sbin

say() { printf '== slurm: %s (%d s)\n' "$*" "$SECONDS"; }
unavailable() { echo "slurm: $*" >&2; exit 75; }
conformance/slurmcluster.sh install || exit $?

data=$(mktemp -d)
export SLURM_CONF=$data/slurm.conf
processes() { # processes SETTING: ids of the processes with this variable in their environment
	( unset SLURM_CONF # grep and cut must not find themselves
		{ grep -l -a -z -x -F -e "$1" /proc/[0-9]*/environ 2>/dev/null || true; } | cut -d/ -f3)
}
# Daemons and jobs have the path of this configuration in their environment, as this shell's
# children have, but not this shell itself.
cluster() { processes "SLURM_CONF=$SLURM_CONF"; }
source conformance/cluster.bash

say "start munged, slurmctld and four slurmd"
mkdir "$data/log"
nodes=(127.0.0.11 127.0.0.12 127.0.0.13 127.0.0.14)
conformance/slurmcluster.sh run "$data" "${nodes[@]}" 2>"$data/log/cluster.out" &
disown
started() { [ -S "$data/munge.sock" ] && sinfo >/dev/null 2>&1; }
wait_for 60 started || unavailable "the controller does not start: $(tail -n 3 "$data"/log/*.out)"
start_node() { # the node's processes have its name in their environment, as the ranks of jobs have
	SLURMD_NODENAME=$1 slurmd -D -N "$1" >>"$data/log/slurmd-$1.out" 2>&1 &
	disown
}
for node in "${nodes[@]}"; do start_node "$node"; done
idle() { [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = "$1" ]; }
wait_for 120 idle 4 || unavailable "the nodes do not start: $(sinfo 2>&1; tail -n 3 "$data"/log/*.out)"

# A job is submitted from the folder of the data, as a user does.
submit() { sbatch --parsable "$@"; }
template() { echo "$root/examples/slurm/$1.sbatch"; }
states() { scontrol -o show job "$1" | sed -n 's/.* JobState=\([A-Z_]*\) .*/\1/p' | sort -u; }
has_ended() { # has_ended JOB: all its tasks are complete; a failed job ends the script
	local now
	now=$(states "$1")
	case $now in
	*FAILED* | *TIMEOUT* | *CANCELLED*)
		echo "slurm: job $1 has ended with $now" >&2
		exit 1
		;;
	esac
	[ "$now" = COMPLETED ]
}
restarts() { scontrol -o show job "$1" | sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p'; }
has_restarted() { [ "$(restarts "$1")" -ge 1 ]; }
weights() { sed -n 's/.*"weights": *"\([0-9a-f]*\)".*/\1/p' "$1/checkpoints/step-00000400/state.json"; }

say "corpus, shards, plan, index files and weights of commands that run alone"
go run ./fixtures/gocorpus --output "$data/corpus" >/dev/null
cd "$data"
mula tokenizer train --quiet --vocab-size 1024 --output tokenizer.json corpus/books >/dev/null
mula tokenize --quiet --tokenizer tokenizer.json --output alone/go corpus/go >/dev/null
index=(--for megatron --data-path "1 alone/go" --tokenizer-path tokenizer.json --split 99,1,0 --seq-length 64 --train-samples 40000 --valid-samples 100 --test-samples 0)
mula index --quiet "${index[@]}" --cache alone/index >/dev/null
printf 'sequence_length: 16\nsources: [{name: go, shards: [alone/go.idx]}]\n' >blend.yaml
mula blend --quiet --config blend.yaml --output plan.json >/dev/null
config() { # config NAME: the configuration of a run of four ranks in the folder of this name
	cat >"$1.yaml" <<END
plan: plan.json
output: $1
model: {preset: mula-nano, vocab_size: 1024, num_hidden_layers: 1}
batch_size: 4
steps: 400
checkpoint: {every: 20}
layout: {expert_dp: 2, ep: 2}
END
}
config alone-run
mula train --quiet --config alone-run.yaml >/dev/null
expected=$(weights alone-run)

say "submit the jobs"
tokens=$(submit --array=0-3 --cpus-per-task=1 "$(template tokenize)" --tokenizer tokenizer.json --output array/go corpus/go)
pauses=()
small=(--ntasks-per-node=2 --cpus-per-task=2 --nodes=3 --time=10 --signal=USR1@60)
runs=(signal requeue spare node)
for name in "${runs[@]}" cancel; do config "$name"; done
signal=$(submit "${small[@]}" --exclude="${nodes[1]}" --time=3 --signal=USR1@120 "$(template train)" --config signal.yaml)
requeue=$(submit "${small[@]}" --exclude="${nodes[1]}" "$(template train)" --config requeue.yaml)
cancel=$(submit "${small[@]}" --exclude="${nodes[1]}" "$(template train)" --config cancel.yaml)
# Node 2 runs two ranks of one job, which goes on without it, and the script of the other.
spare=$(submit "${small[@]}" --no-kill --exclude="${nodes[3]}" "$(template train)" --config spare.yaml)
node=$(submit "${small[@]}" --exclude="${nodes[0]}" "$(template train)" --config node.yaml)
# When a run has a checkpoint, its ranks are stopped, so that it does not end before its fault.
for name in "${runs[@]}" cancel; do
	{ wait_for 300 test -e "$name/checkpoints/step-00000020" && scancel --signal=STOP "${!name}"; } &
	pauses+=($!)
done
for pause in "${pauses[@]}"; do wait "$pause"; done
for name in "${runs[@]}" cancel; do
	[ ! -e "$name/checkpoints/step-00000400" ] || { echo "slurm: run $name has ended before its fault" >&2; exit 1; }
done

scontrol requeue "$requeue"
scancel "$cancel"
# A task of an array starts again, whether it is complete or not.
has_begun() { [[ $(states "$1") != *PENDING* ]]; }
wait_for 300 has_begun "${tokens}_1"
scontrol requeue "${tokens}_1"

say "node ${nodes[1]} dies"
ids=$(processes "SLURMD_NODENAME=${nodes[1]}")
daemons=()
for parent in $(sed -n 's/^PPid:\t//p' $(printf '/proc/%s/status ' $ids) | sort -u); do
	[ "$(cat "/proc/$parent/comm")" != slurmstepd ] || daemons+=("$parent")
done
kill -KILL ${daemons[@]} $ids
scancel --signal=CONT "$spare"

say "job $signal gets its signal before the time limit"
wait_for 300 grep -q "send_job_warn_signal: .*JobId=$signal\$" "$data/log/slurmctld"
scancel --signal=CONT "$signal"

say "job $node starts again, because the node of its script has died"
wait_for 300 has_restarted "$node"
start_node "${nodes[1]}"

say "index files by a job of two nodes, and by an array"
wait_for 300 has_ended "$tokens"
built=$(submit --nodes=2 --cpus-per-task=1 "$(template index)" "${index[@]}" --cache index)
builtArray=$(submit --array=0-1 --nodes=1 --cpus-per-task=1 "$(template index)" "${index[@]}" --cache index-array)
if ldconfig -p | grep -q -e libmpich -e 'libmpi\.so\.12'; then
	say "ranks of srun --mpi=pmi2, without mula launch"
	config mpi
	srun --mpi=pmi2 --nodes=2 --ntasks=4 mula train --quiet --config mpi.yaml >/dev/null
	runs+=(mpi)
fi
for job in $built $builtArray $signal $requeue $spare $node; do wait_for 600 has_ended "$job"; done

say "compare"
for extension in bin idx; do cmp "alone/go.$extension" "array/go.$extension"; done
diff -r alone/index index
diff -r alone/index index-array
for name in "${runs[@]}"; do
	[ "$(weights "$name")" = "$expected" ] || { echo "slurm: run $name has other weights" >&2; exit 1; }
done
for job in $signal $requeue $node; do has_restarted "$job"; done
grep -q '"reason":"a signal to the ranks stopped the run after a checkpoint"' signal/launch.jsonl
[ "$(restarts "$spare")$(restarts "$cancel")$(states "$cancel")" = 00CANCELLED ]
grep -q "\"blamed\":\"${nodes[1]}\"" spare/launch.jsonl
say "all weights, shards and index files are equal"
