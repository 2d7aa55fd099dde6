#!/usr/bin/env bash
# Runs the controller of a Slurm on this machine, for slurm.sh and hosts.py.
#
#     conformance/slurmcluster.sh install          install slurm-wlm and munge if they are missing
#     conformance/slurmcluster.sh run DATA NODE…   run munged and slurmctld until it is killed
#
# DATA is a folder for the files of the cluster. A node is an address of 127.0.0.0/8, which ranks
# can reach. The caller sets SLURM_CONF=DATA/slurm.conf for all its commands. It starts the nodes
# with slurmd -D -N NODE when DATA/munge.sock exists. `install` exits with 75 if Slurm cannot be
# installed.
set -euo pipefail
PATH=$PATH:/usr/sbin

if [ "${1:-}" = install ]; then
	for program in munged slurmctld slurmd sbatch srun; do
		if ! command -v $program >/dev/null; then
			unavailable() { echo "slurm: $*" >&2; exit 75; }
			[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || unavailable "install slurm-wlm and munge; only root can do that here, with apt-get"
			{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge; } >/dev/null 2>&1 ||
				unavailable "slurm-wlm and munge could not be installed (is there a network?)"
			break
		fi
	done
	exit 0
fi
[ "${1:-}" = run ] && [ $# -ge 3 ] || { echo "usage: slurmcluster.sh install | run DATA NODE…" >&2; exit 2; }
data=$2
nodes=("${@:3}")
export SLURM_CONF=$data/slurm.conf
mkdir -p "$data/state" "$data/log"
for node in "${nodes[@]}"; do mkdir -p "$data/spool-$node"; done
chmod 755 "$data"
(umask 077 && head -c 128 /dev/urandom >"$data/munge.key")
ports=($(python3 -c '
import socket, sys
sockets = [socket.socket() for _ in sys.argv]
for s in sockets: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))' "${nodes[@]}"))
list=$(IFS=,; echo "${nodes[*]}")
cat >"$SLURM_CONF" <<CONF
ClusterName=mula
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
# a requeued job waits until the credentials of its first start are invalid
AuthInfo=socket=$data/munge.sock,cred_expire=15
StateSaveLocation=$data/state
SlurmdSpoolDir=$data/spool-%n
SlurmctldPidFile=$data/slurmctld.pid
SlurmdPidFile=$data/slurmd-%n.pid
SlurmctldLogFile=$data/log/slurmctld
SlurmdLogFile=$data/log/slurmd-%n
SlurmctldDebug=debug
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
# the state of jobs is asked for at the end of the tests, on busy machines too
MinJobAge=3600
SlurmdTimeout=30
NodeName=$list NodeHostname=localhost NodeAddr=$list Port=$(IFS=,; echo "${ports[*]:1}") CPUs=16
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
force=()
[ "$(id -u)" != 0 ] || force=(--force)
munged "${force[@]}" --foreground --socket="$data/munge.sock" --key-file="$data/munge.key" --pid-file="$data/munged.pid" \
	--log-file="$data/log/munged" --seed-file="$data/munged.seed" >"$data/log/munged.out" 2>&1 &
while [ ! -S "$data/munge.sock" ]; do
	kill -0 $! 2>/dev/null || { echo "slurm: munged does not start: $(tail -n 3 "$data/log/munged.out")" >&2; exit 1; }
	sleep 0.1
done
exec slurmctld -D -i >"$data/log/slurmctld.out" 2>&1
