# Needs Go, git and make. `make quickstart` runs the main job on real text, `make test` runs the tests; `make help` lists the rest.
export CGO_ENABLED ?= 0
GO       ?= go
FUZZTIME ?= 20s

.PHONY: help build test race lint fmt fuzz bench quickstart clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

build: ## build bin/mula
	$(GO) build -trimpath -o bin/mula ./cli/mula

test: ## run the tests
	$(GO) test ./...

race: ## run the tests under the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race ./...

lint: ## format, vet and staticcheck
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$unformatted" ]; then echo "not formatted, run make fmt:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet ./...
	GOARCH=arm64 $(GO) vet ./...
	$(GO) run -modfile=tools/go.mod honnef.co/go/tools/cmd/staticcheck ./...

fmt: ## format all Go files
	gofmt -w $$(git ls-files '*.go')

fuzz: ## fuzz every target for FUZZTIME each
	@set -e; for pkg in $$($(GO) list ./...); do \
		for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "== $$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$pkg; \
		done; \
	done

bench: ## run the benchmarks
	$(GO) test -run '^$$' -bench . -benchmem ./...

quickstart: build ## the main job, end to end, on real text (a few minutes)
	./fixtures/quickstart.sh quickstart

clean: ## remove what build and quickstart made
	rm -rf bin quickstart
