#!/usr/bin/env python3
"""Runs `mula launch` on three hosts. One of them fails. Compares the weights of the run with an
unbroken run's.

    conformance/hosts.py [--with tcp hot hydra openmpi] [--faults dead dies silent stops wrong]

The hosts are this machine: each is an sshd of Debian at an address of 127.0.0.0/8, in a UTS
namespace of its own. Ranks are started by `mula launch` over ssh, without and with hot spares, by
MPICH's Hydra over ssh, and by Open MPI over ssh. Two hosts are used, the third is a spare, and the
second fails:

dead    it refuses connections from the start
dies    its sshd and all processes are killed after 50 steps, and it refuses connections
silent  from the start, it accepts connections and does not answer
stops   all its processes are stopped after 50 steps, and it does not answer
wrong   a rank computes a gradient that is not finite in step 53

It needs bin/mula, root, Debian's openssh-server, mpich and openmpi-bin, and a minute or less for
each case.
"""

import argparse, json, os, pathlib, random, shutil, signal, socket, subprocess, sys, tempfile, threading, time

root = pathlib.Path(__file__).resolve().parent.parent
addresses = ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
failing = addresses[1]
launchers = {
    "tcp": lambda work: ["--remote-shell", str(work / "remote-shell")],
    "hot": lambda work: ["--remote-shell", str(work / "remote-shell"), "--hot-spares", "2"],
    "hydra": lambda work: [
        "--with", "mpiexec", "--mpiexec", f"mpiexec.mpich -launcher ssh -launcher-exec {work / 'remote-shell'}",
    ],
    "openmpi": lambda work: [
        "--with", "mpiexec",
        "--mpiexec", f"mpiexec.openmpi --allow-run-as-root --mca plm_rsh_agent {work / 'remote-shell'}",
    ],
}
steps = 100


def free_port():
    """Returns a port that is free at all addresses."""
    while True:
        with socket.create_server((addresses[0], 0)) as first:
            port = first.getsockname()[1]
            try:
                for address in addresses[1:]:
                    socket.create_server((address, port)).close()
                return port
            except OSError:
                continue


def prepare(work, faults):
    """Writes the data of the run and the programs to a folder, and returns the run's weights."""
    rng = random.Random(1)
    words = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(2, 7))) for _ in range(500)]
    with open(work / "text.jsonl", "w") as f:
        for n in range(600):
            f.write(json.dumps({"id": str(n), "text": " ".join(rng.choice(words) for _ in range(60))}) + "\n")
    (work / "blend.yaml").write_text("sequence_length: 32\nsources:\n  - {name: a, shards: [shards/a]}\n")
    for name in ["alone"] + [f"{w}-{f}" for w in launchers for f in faults]:
        (work / f"{name}.yaml").write_text(
            f"output: {name}\nmodel: {{preset: mula-nano}}\nbatch_size: 4\nsteps: {steps}\n"
            "checkpoint: {every: 20, keep: 9}\nevaluate: {every: 0}\nlayout: {expert_dp: 2, ep: 2}\n"
        )
    mula = root / "bin" / "mula"
    for args in (
        ["tokenizer", "train", "--vocab-size", "300", "text.jsonl"],
        ["tokenize", "--tokenizer", "tokenizer.json", "--output", "shards/a", "text.jsonl"],
        ["blend"],
        ["train", "--config", "alone.yaml"],
    ):
        subprocess.run([mula, *args], cwd=work, check=True, capture_output=True)
    # The command that the tests of cli run. With a variable it computes wrong values.
    subprocess.run(["go", "test", "-c", "-o", work / "mula", "./cli"], cwd=root, check=True)
    return weights(work / "alone")


def weights(run):
    return json.loads((run / "checkpoints" / f"step-{steps:08d}" / "state.json").read_text())["weights"]


class Host:
    """A host of the test."""

    def __init__(self, work, address, port):
        self.address, self.folder, self.port, self.process, self.listener = address, work / address, port, None, None
        self.folder.mkdir()
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def start(self, environment):
        """Starts the host. environment has variables of all its sessions."""
        config = self.folder / "config"
        variables = " ".join(f'"{k}={v}"' for k, v in environment.items())
        config.write_text(
            f"ListenAddress {self.address}:{self.port}\nHostKey {self.folder}/key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder.parent}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
            + (f"SetEnv {variables}\n" if variables else "")
        )
        self.process = subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", f"hostname {self.address} && exec /usr/sbin/sshd -D -e -f {config}"],
            stderr=open(self.folder / "log", "a"),
            start_new_session=True,
        )
        for _ in range(100):
            try:
                socket.create_connection((self.address, self.port)).close()
                return
            except OSError:
                time.sleep(0.1)
        sys.exit(f"sshd of {self.address} does not start:\n{(self.folder / 'log').read_text()}")

    def processes(self):
        """Returns the processes in the host's namespace."""
        own = os.readlink(f"/proc/{self.process.pid}/ns/uts")
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "uts") == own:
                    found.append(int(entry.name))
            except OSError:
                pass
        return found

    def signal(self, number):
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def silent(self):
        """Accepts connections without an answer."""
        self.listener = socket.create_server((self.address, self.port))
        self.accepted = []

        def accept(listener, accepted):
            try:
                while True:
                    accepted.append(listener.accept())
            except OSError:
                pass

        threading.Thread(target=accept, args=(self.listener, self.accepted), daemon=True).start()

    def stop(self):
        if self.process:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self.listener:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None


def run(work, hosts, launcher, fault, want):
    """Runs a case, and returns None or what is wrong."""
    name, path = f"{launcher}-{fault}", f"{work}:{os.environ['PATH']}"
    for host in hosts:
        environment = {"PATH": path}
        if fault == "wrong" and host.address == failing:
            # Hydra and Open MPI do not tell a rank the name of its host.
            environment |= {"MULA_TEST_POISON": f"{failing} 3 53", "MULA_HOST": failing}
        if host.address != failing or fault not in ("dead", "silent"):
            host.start(environment)
    bad = next(h for h in hosts if h.address == failing)
    if fault == "silent":
        bad.silent()
    began = time.monotonic()
    command = [work / "mula", "launch", "--hosts", ",".join(a + ":2" for a in addresses), "--spares", "1",
        "--ranks", "4", "--section-timeout", "setup=15s,step=8s,checkpoint=15s", "--first-timeout", "15s",
        "--probe-timeout", "10s", "--grace", "2s",
        *launchers[launcher](work), "--", "train", "--config", f"{name}.yaml"]  # fmt: skip
    with open(work / f"{name}.log", "w") as log:
        p = subprocess.Popen(command, cwd=work, stdout=log, stderr=log, env=os.environ | {"PATH": path})
        if fault in ("dies", "stops"):
            metrics = work / name / "metrics.jsonl"
            while p.poll() is None:
                try:
                    if '"step":50,' in metrics.read_text():
                        break
                except FileNotFoundError:
                    pass
                time.sleep(0.02)
            if fault == "dies":
                bad.stop()
            else:
                bad.signal(signal.SIGSTOP)
        try:
            code = p.wait(timeout=300)
        except subprocess.TimeoutExpired:
            p.kill()
            code = "none in 300 s"
    seconds = time.monotonic() - began
    for host in hosts:
        host.stop()
    text = (work / f"{name}.log").read_text()
    if code != 0:
        return f"exit code {code}\n{text[-3000:]}"
    attempts = [json.loads(line) for line in (work / name / "launch.jsonl").read_text().splitlines()]
    last = attempts[-1]
    print(f"   {launcher}, {fault}: {len(attempts)} attempt(s) in {seconds:.1f} s: " +
          "; ".join(f"{a['outcome']} after step {a['step']}" for a in attempts), flush=True)  # fmt: skip
    if weights(work / name) != want:
        return "the weights differ from the weights of the unbroken run"
    if launcher == "hot" and fault in ("dies", "stops"):  # the other ranks go on
        replaced = last.get("replaced", [{}])
        if len(attempts) > 1 or len(replaced) > 1 or replaced[0].get("lost") != [failing] * 2 or \
                replaced[0]["hosts"] != [addresses[2]] * 2 or replaced[0]["from"] < 40:  # fmt: skip
            return f"the attempts are {json.dumps(attempts)}"
        return None
    if len(attempts) < 2 or failing in last["hosts"] or addresses[2] not in last["hosts"]:
        return f"the attempts are {json.dumps(attempts)}"
    if fault in ("dies", "stops", "wrong") and last["from"] < 40:
        return f"the last attempt starts at step {last['from']}, and the fault is at step 50"
    return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--with", nargs="+", choices=list(launchers), default=list(launchers), dest="launchers")
    p.add_argument("--faults", nargs="+", choices=["dead", "dies", "silent", "stops", "wrong"],
        default=["dead", "dies", "silent", "stops", "wrong"])  # fmt: skip
    a = p.parse_args()
    os.environ["CGO_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        work = pathlib.Path(folder)
        os.chmod(work, 0o755)
        want = prepare(work, a.faults)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / "user"], check=True)
        port = free_port()
        (work / "remote-shell").write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {work}/user -p {port} -o BatchMode=yes "
            "-o ConnectTimeout=3 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
            '-o ServerAliveInterval=3 -o ServerAliveCountMax=2 "$@"\n'
        )
        (work / "remote-shell").chmod(0o755)
        os.makedirs("/run/sshd", exist_ok=True)
        hosts = [Host(work, address, port) for address in addresses]
        failed = 0
        for launcher in a.launchers:
            for fault in a.faults:
                if what := run(work, hosts, launcher, fault, want):
                    failed += 1
                    print(f"FAILED {launcher}, {fault}: {what}", flush=True)
        if failed:
            sys.exit(f"{failed} of {len(a.launchers) * len(a.faults)} cases failed")
        print(f"{len(a.launchers) * len(a.faults)} cases: the spare replaces the host, and the weights are equal")


main()
