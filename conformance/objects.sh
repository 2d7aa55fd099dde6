#!/usr/bin/env bash
# Runs the tests of package objects on real servers of object stores. The servers are installed once
# into DIR, outside the repository, and listen on 127.0.0.1 while the tests run.
#
#     conformance/objects.sh DIR [s3] [gs] [az]
#
#     s3   versitygw, a gateway with the interface of S3, built with Go
#     gs   fake-gcs-server, with the interface of Google Cloud Storage, built with Go
#     az   Azurite, Microsoft's emulator of Azure Blob Storage, from npm
#
# Without names it runs all three. TEST sets another command than `go test`, such as a shell. It
# runs with the environment of each server and with MULA_TEST_S3, MULA_TEST_GS or MULA_TEST_AZ, the
# URL of an empty folder. The exit code is 75 if a server cannot be installed.
set -euo pipefail
dir=${1:?"usage: objects.sh DIR [s3] [gs] [az]"}
shift
[ $# -gt 0 ] || set -- s3 gs az
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$(dirname "$0")/.."

versitygw=v1.8.0
fakegcs=v1.56.1
azurite=3.37.0

unavailable() { echo "objects: $* could not be installed (is there a network?)" >&2; exit 75; }
build() { # build NAME MODULE VERSION
	[ -x "$dir/$1-$3/$1" ] || GOBIN=$dir/$1-$3 CGO_ENABLED=0 go install "$2@$3" >&2 || unavailable "$1"
}

data=$(mktemp -d)
servers=()
stop() {
	for pid in "${servers[@]}"; do kill "$pid" 2>/dev/null || true; done
	wait 2>/dev/null || true
	rm -rf "$data"
}
trap stop EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
start() { # start PORT COMMAND...: starts a server and waits until it listens
	local port=$1
	shift
	"$@" >"$data/log" 2>&1 &
	servers+=($!)
	for _ in $(seq 300); do
		if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then return; fi
		kill -0 "${servers[-1]}" 2>/dev/null || break
		sleep 0.1
	done
	echo "objects: $1 does not listen:" >&2
	cat "$data/log" >&2
	exit 1
}
run() { # run NAME TEST: the tests of one store
	echo "== objects: $1" >&2
	if [ -n "${TEST:-}" ]; then bash -c "$TEST"; else go test -count=1 -vet=off -run "^$2\$" -v ./internal/objects | tee "$data/out" | grep -v '^=== '; fi
	if [ -z "${TEST:-}" ] && grep -q -e '--- SKIP' "$data/out"; then echo "objects: the test of $1 was skipped" >&2; exit 1; fi
}

for name in "$@"; do
	port=$(free_port)
	case $name in
	s3)
		build versitygw github.com/versity/versitygw/cmd/versitygw $versitygw
		mkdir -p "$data/s3/bucket" "$data/sidecar"
		export AWS_ACCESS_KEY_ID=mula AWS_SECRET_ACCESS_KEY=mula-test-secret AWS_REGION=us-east-1
		export AWS_ENDPOINT_URL=http://127.0.0.1:$port MULA_TEST_S3=s3://bucket/
		ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY start "$port" \
			"$dir/versitygw-$versitygw/versitygw" --port "127.0.0.1:$port" --quiet posix --sidecar "$data/sidecar" "$data/s3"
		run s3 TestS3
		;;
	gs)
		build fake-gcs-server github.com/fsouza/fake-gcs-server $fakegcs
		mkdir -p "$data/gs/bucket"
		export STORAGE_EMULATOR_HOST=127.0.0.1:$port MULA_TEST_GS=gs://bucket/
		start "$port" "$dir/fake-gcs-server-$fakegcs/fake-gcs-server" -scheme http -host 127.0.0.1 -port "$port" \
			-backend memory -data "$data/gs" -public-host "127.0.0.1:$port" -log-level error
		run gs TestGCS
		;;
	az)
		if [ ! -e "$dir/azurite-$azurite/complete" ]; then
			npm install --silent --no-fund --no-audit --prefix "$dir/azurite-$azurite" "azurite@$azurite" >&2 || unavailable azurite
			touch "$dir/azurite-$azurite/complete"
		fi
		export MULA_TEST_AZ=az://container/
		export AZURE_STORAGE_CONNECTION_STRING="DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:$port/devstoreaccount1"
		start "$port" "$dir/azurite-$azurite/node_modules/.bin/azurite-blob" --blobHost 127.0.0.1 --blobPort "$port" \
			--location "$data/az" --silent --skipApiVersionCheck --disableTelemetry
		run az TestAzure
		;;
	*)
		echo "objects: unknown server $name; it must be s3, gs or az" >&2
		exit 2
		;;
	esac
done
