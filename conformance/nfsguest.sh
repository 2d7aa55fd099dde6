# The part of nfs.sh in the virtual machine. /mnt is the folder of the run.
set -euo pipefail
export PATH=/usr/sbin:/sbin:/usr/bin:/bin
say() { printf -- '-- %s (%d s)\n' "$*" "$SECONDS"; }

ip link set lo up
mkdir -p /var/lib/nfs/{v4recovery,rpc_pipefs,sm} /run/rpc_pipefs /tmp/export /tmp/nfs
touch /var/lib/nfs/{etab,rmtab}
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs sunrpc /run/rpc_pipefs
mount -t tmpfs tmpfs /tmp/export
cp -r /mnt/{mula,corpus,alone,tokenizer.json,plan.json} /tmp/export/
for name in restarted replaced; do
	sed "s|^output.*|output: $name|" /mnt/train.yaml >/tmp/export/$name.yaml
done
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
# All hosts have one identity for the server, so a host would not lose its delegation of a file
# when another host writes the file.
echo 0 >/proc/sys/fs/leases-enable
exportfs -o rw,fsid=0,no_root_squash,insecure,no_subtree_check '*:/tmp/export'
rpc.mountd -N 3 -N 2
rpc.nfsd -N 3 8
sleep 11

# A host is a mount namespace with a mount that shares no cache, and a host name.
hosts=(127.0.0.10 127.0.0.11 127.0.0.12 127.0.0.13)
for host in "${hosts[@]}"; do
	unshare --mount --uts sh -c "hostname $host; mount -t nfs4 -o nosharecache 127.0.0.1:/ /tmp/nfs && exec sleep 10000" &
	echo $! >/tmp/host.$host
done
cat >/tmp/on <<'END'
#!/bin/sh
host=$1
shift
exec nsenter --mount --uts --root --wd -t $(cat /tmp/host.$host) -- /bin/sh -c "cd /tmp/nfs; $*"
END
chmod +x /tmp/on
for host in "${hosts[@]}"; do
	until /tmp/on $host 'mountpoint -q /tmp/nfs'; do sleep 1; done
done
say "four hosts: $(uname -r), $(/tmp/on "${hosts[0]}" 'grep -o " nfs4 [^ ]*vers=[^,]*" /proc/mounts' | tail -n 1)"

# A host that has not found a name may not see it until it changes the folder, as mula does.
/tmp/on "${hosts[1]}" 'test ! -e early'
/tmp/on "${hosts[2]}" 'echo > early'
hidden=$(/tmp/on "${hosts[1]}" 'test -e early || echo ", and hides new names from hosts that have looked for them"')
/tmp/on "${hosts[1]}" 'touch mine; test -e early'
say "NFS works$hidden"

job='mula tokenize -q --tokenizer tokenizer.json --output shards/text --shard-tokens 150k --workers 1 corpus'
workers=()
for host in "${hosts[@]:1}"; do
	/tmp/on $host "./$job" &
	workers+=($!)
done
until ls /tmp/export/shards/*.idx >/dev/null 2>&1; do sleep 0.2; done
kill -9 ${workers[0]}
say "one of three workers is killed, with $(ls /tmp/export/shards/*.idx | wc -l) of $(ls /tmp/export/alone/*.idx | wc -l) shards"
wait ${workers[1]}
wait ${workers[2]}

steps() { { grep -o '"step":[0-9]*' /tmp/export/$1/metrics.jsonl 2>/dev/null || true; } | tail -n 1 | cut -d: -f2; }
train() { # train NAME FLAGS: kills rank 0 after five steps
	local name=$1
	shift
	say "train: $name"
	/tmp/on "${hosts[0]}" "./mula launch --hosts 127.0.0.11,127.0.0.12,127.0.0.13 --spares 1 $* --remote-shell /tmp/on \
		-- train --config $name.yaml" &
	local launcher=$! s=0
	until s=$(steps $name) && [ "${s:-0}" -ge 5 ]; do sleep 0.1; done
	kill -9 "$(grep -o '"pid":[0-9]*' /tmp/export/$name/launch/attempt-001/heartbeat | cut -d: -f2)"
	say "rank 0 is killed after $s steps"
	wait $launcher
}
train restarted
train replaced --hot-spares 1
cp -r /tmp/export/{shards,restarted,replaced} /mnt/
touch /mnt/complete
