#!/usr/bin/env bash
# Runs mula on NFS. A virtual machine is the server and four hosts, each with a mount of its own.
# Three workers tokenize, and one of them is killed. Two ranks train, and the first one is killed:
# mula launch starts the run again on a spare host, and then a hot spare takes over. Shards and
# weights are compared with the output of commands that ran on this machine.
#
#     conformance/nfs.sh                needs root, bin/mula and Go
#     ACCEL=tcg conformance/nfs.sh      QEMU emulates the processor, which takes ten minutes
#
# Without ACCEL=tcg, it needs a /dev/kvm that works. Debian's packages are installed if they are
# missing, and a kernel is downloaded. The exit code is 75 if that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export PATH=$root/bin:$PATH:/usr/sbin:/sbin

say() { printf '== nfs: %s (%d s)\n' "$*" "$SECONDS"; }
fail() { echo "nfs: $*" >&2; exit 1; }
unavailable() { echo "nfs: $*" >&2; exit 75; }
[ "$(id -u)" = 0 ] || unavailable "only root can run this script"
packages=(qemu-system-x86 busybox-static cpio kmod nfs-kernel-server)
for program in qemu-system-x86_64 busybox cpio modprobe exportfs rpc.nfsd; do
	if ! command -v $program >/dev/null; then
		apt-get install -y --no-install-recommends "${packages[@]}" >/dev/null ||
			unavailable "cannot install ${packages[*]}"
	fi
done
accel=${ACCEL:-$([ -e /dev/kvm ] && echo kvm || echo tcg)}
processor=$([ "$accel" = kvm ] && echo host || echo max)
data=$(mktemp -d)
machine= # process of the virtual machine
cluster() { if [ -n "$machine" ] && kill -0 "$machine" 2>/dev/null; then echo "$machine"; fi; }
source conformance/cluster.bash
cd "$data"

say "kernel"
mkdir kernel initrd work
kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-\S*\)$/\1/p' | head -n 1)
(cd kernel && apt-get download "$kernel" >/dev/null 2>&1) || unavailable "cannot download the kernel"
dpkg-deb -x kernel/*.deb kernel/root
version=$(ls kernel/root/lib/modules)
depmod -b kernel/root "$version"
mkdir -p initrd/{bin,proc,sys,dev,mnt,modules}
cp "$(command -v busybox)" initrd/bin/
for module in virtio_pci 9pnet_virtio 9p nfsd nfs nfsv4; do
	modprobe -S "$version" -d kernel/root --show-depends $module | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r file; do
	cp "$file" initrd/modules/
	basename "$file" >>initrd/modules/order
done
# The root of the guest is this machine's, read only. work is the folder of the run.
cat >initrd/init <<'END'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
while read file; do $b insmod /modules/$file; done </modules/order
share() { $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,$3 $1 $2; }
share root /mnt ro
$b mount --move /proc /mnt/proc
$b mount --move /sys /mnt/sys
$b mount --move /dev /mnt/dev
for dir in tmp run var/lib/nfs; do $b mount -t tmpfs tmpfs /mnt/$dir; done
share work /mnt/mnt rw
$b mkdir -p /mnt/dev/shm
$b mount -t tmpfs tmpfs /mnt/dev/shm
$b chroot /mnt /bin/bash /mnt/nfsguest.sh >/mnt/mnt/guest.log 2>&1
$b sync
$b poweroff -f
END
chmod +x initrd/init
(cd initrd && find . | cpio -o -H newc 2>/dev/null | gzip -1) >initrd.gz

say "inputs, and the output of commands that run on this machine"
cp "$root/bin/mula" "$root/conformance/nfsguest.sh" work/
(cd "$root" && go run ./fixtures/gocorpus --output "$data/corpus") >/dev/null
mkdir work/corpus
mv corpus/books corpus/assembly work/corpus/
cd work
mula tokenizer train -q --vocab-size 512 --output tokenizer.json corpus
mula tokenize -q --tokenizer tokenizer.json --output alone/text --shard-tokens 150k corpus
cat >blend.yaml <<'END'
sequence_length: 64
sources: [{name: text, shards: alone/text-*, weight: 1}]
samples: 100
END
mula blend -q --config blend.yaml --output plan.json >blend.out
cat >train.yaml <<'END'
plan: plan.json
output: run
model:
  {preset: mula-nano, vocab_size: 512, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 1, num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2}
batch_size: 2
steps: 12
layout: {expert_dp: 2}
checkpoint: {every: 4, snapshot_every: 2}
evaluate: {every: 0}
END
mula launch -q -- train --config train.yaml >alone.out

say "virtual machine with $accel"
qemu-system-x86_64 -accel "$accel" -cpu "$processor" -m 4G -nographic -no-reboot \
	-kernel ../kernel/root/boot/vmlinuz-* -initrd ../initrd.gz -append 'console=ttyS0 quiet panic=-1' \
	-virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
	-virtfs local,path=.,mount_tag=work,security_model=none </dev/null >console.log 2>&1 &
machine=$!
ended() { [ -z "$(cluster)" ]; }
started() { [ -e guest.log ] || ended; }
if ! wait_for 120 started || [ ! -e guest.log ]; then
	fail "the virtual machine does not start with $accel; with ACCEL=tcg, QEMU emulates the processor"
fi
wait_for 1800 ended
cat guest.log
[ -e complete ] || fail "the guest's script failed"

say "compare"
hashes() { (cd "$1" && sha256sum text-*.{bin,idx,sums}); }
diff <(hashes alone) <(hashes shards) || fail "the shards of three workers on NFS differ"
weights() { sed -n 's/.*"weights": "\([0-9a-f]*\)".*/\1/p' "$1/checkpoints/step-00000012/state.json"; }
[ -n "$(weights run)" ] || fail "the run on this machine has no weights"
for run in restarted replaced; do
	[ "$(weights $run)" = "$(weights run)" ] || fail "the run $run has other weights"
	grep -q '"attempt":1,.*"from":0,"step":[1-9]' $run/launch.jsonl || fail "the launcher saw no step of the run $run"
done
[ "$(wc -l <restarted/launch.jsonl)" = 2 ] || fail "the restarted run did not have two attempts"
[ "$(grep -c '"replaced":' replaced/launch.jsonl)" = "$(wc -l <replaced/launch.jsonl)" ] || fail "no hot spare took over"
say "shards and weights are equal"
