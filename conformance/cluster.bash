# For scripts that run a cluster of processes on this machine: its end, and waiting. The script sets
# data, the folder of the cluster and its logs, and defines cluster, which prints the ids of the
# processes of the cluster.

stop_cluster() {
	local code=$? ids
	trap - EXIT
	if [ $code != 0 ] && [ $code != 75 ]; then # 75: unavailable
		find "$data" -maxdepth 2 \( -name '*.log' -o -name '*ctld' \) -exec tail -n 30 {} + >&2 || true
	fi
	while ids=$(cluster); [ -n "$ids" ]; do
		kill -KILL $ids 2>/dev/null || true
		sleep 0.2
	done
	rm -rf "$data"
	exit $code
}
trap stop_cluster EXIT

# wait_for SECONDS COMMAND…: waits until the command succeeds. The time is for machines that hang.
wait_for() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		if [ $SECONDS -ge $end ]; then
			echo "${0##*/}: no success in time: $*" >&2
			return 1
		fi
		sleep 0.1
	done
}
