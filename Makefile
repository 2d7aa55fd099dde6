# Needs Go, git and make. `make quickstart` runs the main job on real text, `make test` runs the
# tests, and `make help` lists all targets.
export CGO_ENABLED ?= 0
GO       ?= go
# One setting for all builds, so that `make build`, `make test` and `make lint` share the cache.
export GOFLAGS := $(shell $(GO) env GOFLAGS) -trimpath
FUZZTIME ?= 20s
# The folder of the originals' Python environments, about 8 GB; see conformance/environments.sh.
ENVIRONMENTS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mula/conformance
# The version is the newest tag of git, as in 1.2.3-4-gabc. Without a tag the go command sets it
# from the commit.
VERSION ?= $(patsubst v%,%,$(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null))
LDFLAGS = $(if $(VERSION),-X mula/internal/version.number=$(VERSION))

.PHONY: help build check dist man site screenshots test test-long race lint fmt fuzz bench bench-index bench-encoding bench-training bench-products bench-kernels bench-loaders simulate-ranks simulate-cluster pvc nvidia gpu gpu-programs conformance conformance-ids conformance-layouts conformance-huggingface slurm hosts nfs ray quickstart clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 26

build: ## build bin/mula
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/mula ./cli/mula

man: ## write the man pages to dist/man
	rm -rf dist/man
	$(GO) run -ldflags '$(LDFLAGS)' ./cli/manpages -output dist/man -date '$(shell git log -1 --format=%cs 2>/dev/null)'

# The property tests (rapid) of `make test`, `make check` and `make race` draw the same 10 cases in
# every run: with -short, rapid draws a fifth of RAPID_CHECKS. `make test-long` draws 2,000 new
# cases. A failing test prints the seed, and RAPID_SEED=N repeats it.
test check race: export RAPID_SEED ?= 1
test check race: export RAPID_CHECKS ?= 50

test: ## run the short tests
	GO=$(GO) $(GO) run ./internal/gotest -vet=off -short ./...
	$(GO) -C clients/go test -vet=off ./...

check: ## the inner loop: build, vet, staticcheck, the rules of internal/lint, short tests
	$(GO) build ./...
	$(GO) vet ./...
	$(GO) run -modfile=tools/go.mod honnef.co/go/tools/cmd/staticcheck ./...
	$(GO) test ./internal/lint
	GO=$(GO) $(GO) run ./internal/gotest -vet=off -short ./...

test-long: export RAPID_CHECKS ?= 2000
test-long: ## run all tests, random tests with new cases and more rounds
	GO=$(GO) MULA_TEST_LONG=1 $(GO) run ./internal/gotest -vet=off -count=1 -timeout 60m ./...

# The short tests of cli and conformance take minutes, and run commands of packages that have tests
# of their own.
race: ARGS ?= -short
race: ## run the short tests under the race detector (needs a C compiler; ARGS= runs all tests)
	GO=$(GO) CGO_ENABLED=1 $(GO) run ./internal/gotest -vet=off -race -timeout 30m $(ARGS) $$($(GO) list ./... | grep -v -x -e mula/internal/lint $(if $(ARGS),-e mula/cli -e mula/conformance))

# For arm64, lint vets the packages that have other files there. Vetting all packages compiles them
# and their dependencies, which takes minutes, and .ci/packages builds the programs for arm64.
FILES = {{.ImportPath}} {{.GoFiles}} {{.SFiles}} {{.TestGoFiles}} {{.XTestGoFiles}}
lint: ## format, vet, staticcheck, the rules of internal/lint, links of the documentation
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$unformatted" ]; then echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	GOARCH=arm64 $(GO) vet $$({ $(GO) list -f '$(FILES)' ./...; GOARCH=arm64 $(GO) list -f '$(FILES)' ./...; } | sort | uniq -u | cut -d' ' -f1 | sort -u)
	$(GO) run -modfile=tools/go.mod honnef.co/go/tools/cmd/staticcheck ./...
	$(GO) test ./internal/lint
	$(GO) -C clients/go vet ./...
	$(GO) -C tools vet ./...
	$(GO) -C tools test ./...
	$(GO) -C tools run ./site --check

site: ## build the documentation as a static site in site/ and check its links
	$(GO) -C tools run ./site

fmt: ## format all Go files
	gofmt -w $$(git ls-files '*.go')

fuzz: ## fuzz every target for FUZZTIME each
	@set -e; for pkg in $$($(GO) list ./...); do \
		for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "== $$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x $$pkg; \
		done; \
	done

bench: ## run the benchmarks
	$(GO) test -run '^$$' -bench . -benchmem ./...

bench-index: build ## index files: the frameworks' own code and mula side by side (about an hour; ARGS='--scale 0.01' tries it)
	conformance/environments.sh $(ENVIRONMENTS) megatron-0.16.1
	$(ENVIRONMENTS)/torch/bin/python benchmarks/index.py --environments $(ENVIRONMENTS) $(ARGS)

bench-encoding: build ## tokenizing: tokenizers, fastokens, gigatoken, tiktoken and mula side by side (ARGS='--tokenizers FILE… --corpus DIR')
	conformance/environments.sh $(ENVIRONMENTS) tokenizers-0.23.3 encoders
	$(ENVIRONMENTS)/encoders/bin/python benchmarks/encoding.py --python $(ENVIRONMENTS)/encoders/bin/python $(ENVIRONMENTS)/tokenizers-0.23.3/bin/python $(ARGS)

bench-training: build ## training: PyTorch + transformers and mula side by side (an hour and more; ARGS='--quick' tries it)
	conformance/environments.sh $(ENVIRONMENTS) transformers-5.23.0
	$(ENVIRONMENTS)/transformers-5.23.0/bin/python benchmarks/training.py $(ARGS)

bench-products: ## matrix products: OpenBLAS, torch and mula side by side (ARGS='--threads 1 --shapes a g')
	conformance/environments.sh $(ENVIRONMENTS) transformers-5.23.0
	$(ENVIRONMENTS)/transformers-5.23.0/bin/python benchmarks/products.py $(ARGS)

bench-loaders: build ## loaders: mula, Grain, MosaicML Streaming, Megatron core, datatrove, OLMo-core side by side (15 minutes; ARGS='--megabytes 2000 --rounds 1')
	conformance/environments.sh $(ENVIRONMENTS) loaders
	$(ENVIRONMENTS)/loaders/bin/python benchmarks/loaders.py $(ARGS)

simulate-ranks: ## the trainer on 384 to 12,288 simulated ranks, compared with mula estimate; writes benchmarks/ranks.md and ranks.svg (needs 16 GB of memory)
	GOGC=70 GOMEMLIMIT=14GiB MULA_SIMULATE_RANKS=$(CURDIR)/benchmarks/ranks $(GO) test -count=1 -timeout 60m -run TestSimulateRanks -v ./train

SIMULATIONS ?= ./train ./tokenize/job
simulate-cluster: ## training runs and tokenize jobs on a simulated cluster with faults (SEED=7 replays one run, SEEDS=10000 FIRST=1 searches many, PLANT=lost-sync adds a bug, SIMULATIONS=./train selects one)
	MULA_CLUSTER_PLANT=$(PLANT) MULA_CLUSTER_SEED=$(SEED) MULA_CLUSTER_SEEDS=$(if $(SEED),,$(or $(SEEDS),1000)) MULA_CLUSTER_FIRST=$(FIRST) $(GO) test -vet=off -count=1 -timeout 0 -run 'TestSimulateCluster$$' -p 1 -v $(SIMULATIONS)

bench-kernels: ## every command of the device at mula-mini's sizes: processor, OpenCL and floor; writes the tables of benchmarks/kernels.md (ARGS='-rows 4 -precision bf16')
	$(GO) run ./benchmarks/kernels -table benchmarks/kernels.md $(ARGS)

pvc: ## compile all kernels for Intel's Ponte Vecchio, check the machine code, write the table of benchmarks/pvc.md (needs ocloc)
	$(GO) run ./xpu/gpu/pvccheck -table benchmarks/pvc.md

nvidia: ## compile all kernels for NVIDIA's GPUs, check the machine code, write the table of benchmarks/nvidia.md (needs clang, libclc, ptxas, nvdisasm; ARGS='-clang clang-15 -ptxas FILE')
	$(GO) run ./xpu/gpu/nvidiacheck -table benchmarks/nvidia.md $(ARGS)

# What benchmarks/gpu.sh runs, for a machine without Go too.
GPU_PROGRAMS = bin/gpu
gpu: gpu-programs ## all that a GPU can show in ten minutes: tests, kernels, training; writes bin/gpu/report.md
	benchmarks/gpu.sh $(GPU_PROGRAMS) $(GPU_PROGRAMS)/report.md

gpu-programs: ## build the programs of `make gpu`
	mkdir -p $(GPU_PROGRAMS)
	$(GO) build -ldflags '-s -w $(LDFLAGS)' -o $(GPU_PROGRAMS)/mula ./cli/mula
	$(GO) build -ldflags '-s -w' -o $(GPU_PROGRAMS)/kernels ./benchmarks/kernels
	for p in xpu/opencl xpu/gpu moe train; do $(GO) test -c -ldflags '-s -w' -o $(GPU_PROGRAMS)/$${p##*/}.test ./$$p; done

conformance: build ## compare index files of mula, Megatron core and OLMo-core, from PyPI (needs python3.11)
	conformance/environments.sh $(ENVIRONMENTS)
	$(ENVIRONMENTS)/torch/bin/python conformance/compare.py --environments $(ENVIRONMENTS) --versions 0.19.2 0.16.1 0.9.0 --count 250 --large
	$(ENVIRONMENTS)/torch/bin/python conformance/compare.py --environments $(ENVIRONMENTS) --versions 0.4.0 0.5.0 0.6.0 0.7.0 0.8.0 0.10.0 0.11.0 0.12.3 0.13.1 0.16.1-fma 0.17.1 0.18.2 --count 60
	$(ENVIRONMENTS)/torch/bin/python conformance/read.py --environments $(ENVIRONMENTS)
	$(ENVIRONMENTS)/torch/bin/python conformance/mix.py --environments $(ENVIRONMENTS)
	$(ENVIRONMENTS)/torch/bin/python conformance/olmo.py --environments $(ENVIRONMENTS)

conformance-ids: ## compare ids of mula and Hugging Face tokenizers, with published vocabularies (ARGS='--corpus DIR --scale 0.1')
	conformance/environments.sh $(ENVIRONMENTS) tokenizers-0.23.3
	$(ENVIRONMENTS)/tokenizers-0.23.3/bin/python conformance/vocabularies.py $(ENVIRONMENTS)/vocabularies
	$(ENVIRONMENTS)/tokenizers-0.23.3/bin/python conformance/ids.py --environments $(ENVIRONMENTS) --tokenizers $(ENVIRONMENTS)/vocabularies/*.json $(ARGS)

conformance-layouts: build ## compare shards of mula, dolma, OLMo-core, datatrove, MosaicML Streaming, Megatron core, in both directions
	conformance/environments.sh $(ENVIRONMENTS) layouts dolma-1.2.1
	$(ENVIRONMENTS)/layouts/bin/python conformance/layouts.py --frameworks $(ENVIRONMENTS)/layouts/bin/python --dolma $(ENVIRONMENTS)/dolma-1.2.1/bin/python $(ARGS)

conformance-huggingface: build ## compare logits, gradients, weights and tokens with transformers, in both directions (ARGS='--count 100 --seed 2')
	conformance/environments.sh $(ENVIRONMENTS) transformers-5.23.0 transformers-4.57.6
	$(ENVIRONMENTS)/transformers-5.23.0/bin/python conformance/huggingface.py $(ARGS)
	$(ENVIRONMENTS)/transformers-4.57.6/bin/python conformance/huggingface.py $(ARGS)

# Not in .ci/run: it waits for Slurm's timers, and needs packages of Debian. Run it every night, and
# after changes of examples/slurm or train/launch.
slurm: build ## run the templates of examples/slurm in a Slurm of four nodes on this machine (two minutes; needs slurm-wlm, munge)
	conformance/slurm.sh

hosts: build ## lose a host of a run in five ways, with ssh, hot spares, Hydra, Open MPI, a stand-in of PALS, and Slurm on this machine (ten minutes; needs root, openssh-server, mpich, openmpi-bin, slurm-wlm, munge; ARGS='--with tcp --faults dead wrong')
	conformance/hosts.py $(ARGS)

nfs: build ## tokenize and train on four hosts of a virtual machine that share NFS, and kill a worker and a rank (needs root; ACCEL=tcg: without KVM, in ten minutes)
	conformance/nfs.sh

ray: build ## run examples/ray and the recipe for Ray Train in a Ray of four nodes on this machine (a few minutes)
	conformance/environments.sh $(ENVIRONMENTS) ray
	conformance/ray.sh $(ENVIRONMENTS)/ray

quickstart: build ## the main job, end to end, on real text (a few minutes)
	./fixtures/quickstart.sh quickstart

screenshots: build ## take the screenshots of docs/images from the data of `make quickstart` (needs Chromium)
	./fixtures/screenshots.sh quickstart

dist: ## build all release files in dist/ (ARGS=-allow-dirty builds files that differ from the commit)
	$(GO) -C tools run ./dist -root '$(CURDIR)' -output '$(CURDIR)/dist' $(ARGS)

clean: ## remove what build and quickstart made
	rm -rf bin quickstart site
