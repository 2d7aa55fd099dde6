#!/bin/sh
# Everything that a machine with a GPU can show of mula, in at most ten minutes: the tests of its
# OpenCL device on that GPU, kernels and passes with their times, and training, beside PyTorch if
# python3 has torch, transformers and pyarrow.
#
#   benchmarks/gpu.sh PROGRAMS REPORT [STEP…]
#
# With names of steps, such as devices, gpu or training-mid, it runs these alone.
# PROGRAMS is the folder that `make gpu` builds; Go itself is not needed. After a failure the others
# go on, and the script exits with 1. Logs are written beside the report.
set -u

programs=$(cd "$1" && pwd) || exit 2
report=$2
shift 2
wanted=" $* "
root=$(cd "$(dirname "$0")/.." && pwd)
began=$(date +%s)
failed=0
limit=580 # seconds, for all
mkdir -p "$(dirname "$report")"
logs=$(cd "$(dirname "$report")" && pwd)
: >"$report"

say() { printf '%s\n' "$*" | tee -a "$report"; }

# step NAME SECONDS FOLDER COMMAND…: runs a command in a folder and writes NAME.log.
step() {
	name=$1 most=$2 folder=$3
	shift 3
	case $wanted in "  " | *" $name "*) ;; *) return ;; esac
	left=$((limit - $(date +%s) + began))
	[ "$left" -lt "$most" ] && most=$left
	if [ "$most" -lt 5 ]; then
		say "- $name: no time was left"
		failed=1
		return
	fi
	from=$(date +%s)
	if (cd "$folder" && timeout "$most" "$@") >"$logs/$name.log" 2>&1; then
		say "- $name: passed, $(($(date +%s) - from)) s"
	else
		say "- $name: FAILED with $?, $(($(date +%s) - from)) s; see $name.log"
		failed=1
		grep -E '^ *--- FAIL|panic:|rror' "$logs/$name.log" | head -n 8 | sed 's/^/      /' | tee -a "$report"
	fi
}

# show NAME: the tables and figures of a log.
show() {
	[ -e "$logs/$1.log" ] || return 0
	say ""
	cat "$logs/$1.log" >>"$report"
	say ""
}

say "# mula on a GPU"
say ""
say "$(date -u +%F), $("$programs/mula" version | head -n 1)."
say ""
step devices 60 "$root" "$programs/mula" devices
show devices
for suite in opencl gpu moe train; do
	case $suite in
	opencl) folder=xpu/opencl only=. ;;
	gpu) folder=xpu/gpu only=. ;;
	moe) folder=moe only='^TestGPU' ;;
	train) folder=train only='OpenCL' ;;
	esac
	step "$suite" 150 "$root/$folder" "$programs/$suite.test" -test.run "$only" -test.v
done
for precision in fp32 bf16; do
	for preset in mula-mini mula-1b; do
		step "pass-$preset-$precision" 60 "$root" "$programs/kernels" -step "$preset" -rows 8 -rounds 3 -precision "$precision"
		show "pass-$preset-$precision"
	done
done
step kernels 120 "$root" "$programs/kernels" -rows 8 -rounds 3 -precision bf16
show kernels
if python3 -c 'import torch, transformers, numpy, pyarrow' 2>/dev/null; then
	for model in mid cut tiny; do
		step "training-$model" 120 "$root" python3 benchmarks/training.py --mula "$programs/mula" --gpu --no-compile \
			--rounds 1 --models "$model" --precisions bf16
		show "training-$model"
	done
else
	say "- training: python3 has no torch, transformers, numpy or pyarrow"
fi
say "$(($(date +%s) - began)) s in all"
exit $failed
