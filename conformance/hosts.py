#!/usr/bin/env python3
"""Runs `mula launch` on three hosts. One of them fails. Compares the weights of the run with an
unbroken run's.

    conformance/hosts.py [--with tcp hot hydra openmpi pals slurm]
        [--faults dead dies silent stops wrong]

The hosts are this machine. Each has a host name of its own (in a UTS namespace), and a server at an
address of 127.0.0.0/8: an sshd of Debian, or the slurmd of a node. Ranks are started

tcp      by `mula launch` over ssh
hot      by `mula launch` over ssh, with hot spares
hydra    by MPICH's Hydra over ssh
openmpi  by Open MPI over ssh
pals     by the job script of examples/pbs, with a stand-in of PALS's mpiexec (conformance/pals)
slurm    by the job script of examples/slurm, in a job with --no-kill of a Slurm of three nodes

Two hosts are used, the third is a spare, and the second fails:

dead    it refuses connections from the start
dies    its server and all processes are killed after 50 steps, and it refuses connections
silent  from the start, it accepts connections and does not answer
stops   all its processes are stopped after 50 steps, and it does not answer
wrong   a rank computes a gradient that is not finite in step 53

A slurmd is killed (dead) or stopped (silent) when Slurm has seen the node, and just before the job
is submitted: Slurm uses no nodes that failed earlier.

It needs bin/mula, Go, root, Debian's openssh-server, mpich, openmpi-bin, slurm-wlm and munge, and a
minute or less for each case.
"""

import argparse, datetime, json, os, pathlib, random, shutil, signal, socket, subprocess, sys, tempfile, threading, time

root = pathlib.Path(__file__).resolve().parent.parent
addresses = ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
failing = addresses[1]
# The limits of users are minutes. Steps take milliseconds here.
limits = "--section-timeout setup=15s,step=8s,checkpoint=15s --first-timeout 15s --probe-timeout 10s --grace 2s"
steps = 100


def connects(address, port):
    try:
        socket.create_connection((address, port)).close()
        return True
    except OSError:
        return False


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


def wait_for(what, condition, log):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    sys.exit(f"{what}: not ready within a minute\n{log.read_text()}")


def prepare(work, launchers, faults):
    """Writes data and programs to a folder, and returns the weights of the unbroken run."""
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


def edit(script, path, *edits):
    """Writes a job script with changes: pairs of a text and its replacement."""
    text = script.read_text()
    for old, new in edits:
        if text.count(old) != 1:
            sys.exit(f"{script} has {text.count(old)} times {old!r}, and the test expects it once")
        text = text.replace(old, new)
    path.write_text(text)


class Host:
    """A host of the test: a server, and all processes in its namespace."""

    def __init__(self, work, name):
        self.name, self.folder, self.process, self.listener = name, work / name, None, None
        self.folder.mkdir()
        self.log = self.folder / "log"

    def start(self, command, environment=None):
        """Starts the server."""
        self.process = subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command],
            stdout=subprocess.DEVNULL, stderr=open(self.log, "a"), env=environment, start_new_session=True,
        )  # fmt: skip

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

    def silent(self, port):
        """Accepts connections without an answer."""
        self.listener = socket.create_server((self.name, port))
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


class Ssh:
    """Three hosts with an sshd, and a remote shell that connects to them."""

    def __init__(self, work):
        self.work, self.port, self.shell = work, free_port(), work / "remote-shell"
        self.hosts = [Host(work, address) for address in addresses]
        for key in [work / "user"] + [host.folder / "key" for host in self.hosts]:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.shell.write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {work}/user -p {self.port} -o BatchMode=yes "
            "-o ConnectTimeout=3 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
            '-o ServerAliveInterval=3 -o ServerAliveCountMax=2 "$@"\n'
        )
        self.shell.chmod(0o755)
        os.makedirs("/run/sshd", exist_ok=True)

    def start(self, fault, variables):
        """Starts the hosts for a case. Sessions of the failing host have the variables."""
        for host in self.hosts:
            bad = host.name == failing
            all_variables = {"PATH": os.environ["PATH"]} | (variables if bad else {})
            config = host.folder / "config"
            config.write_text(
                f"ListenAddress {host.name}:{self.port}\nHostKey {host.folder}/key\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {self.work}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
                "SetEnv " + " ".join(f'"{k}={v}"' for k, v in all_variables.items()) + "\n"
            )
            if bad and fault == "silent":
                host.silent(self.port)
            elif not bad or fault != "dead":
                host.start(["/usr/sbin/sshd", "-D", "-e", "-f", config])
                wait_for(f"sshd of {host.name}", lambda: connects(host.name, self.port), host.log)

    def stop(self):
        for host in self.hosts:
            host.stop()

    def launch(self, config, *flags):
        """Returns the command that a user would type."""
        return [
            self.work / "mula", "launch", "--hosts", ",".join(a + ":2" for a in addresses), "--spares", "1",
            "--ranks", "4", *limits.split(), *flags, "--", "train", "--config", config,
        ]  # fmt: skip

    def pals(self, config):
        """Returns the command for the job script of PBS, and its environment."""
        programs, script = self.work / "pals", self.work / "train.pbs"
        if not programs.exists():
            subprocess.run(["go", "build", "-o", programs / "mpiexec", "./conformance/pals"], cwd=root, check=True)
            edit(root / "examples" / "pbs" / "train.pbs", script, ("ranks=12 ", "ranks=2 "),
                ("mula launch ", f"mula launch {limits} "))  # fmt: skip
            (self.work / "nodes").write_text("".join(f"{address}\n" for address in addresses))
        return ["bash", script], {
            "PATH": f"{programs}:{os.environ['PATH']}", "PALS_STAND_IN_SHELL": str(self.shell),
            "PALS_STAND_IN_TIMEOUT": "12s", "PBS_NODEFILE": str(self.work / "nodes"), "PBS_JOBID": "1.pbs",
            "PBS_O_WORKDIR": str(self.work), "CONFIG": config,
        }  # fmt: skip


class Slurm:
    """Three nodes of a Slurm. Each case has a Slurm of its own."""

    def __init__(self, work):
        self.work, self.case = work, 0
        subprocess.run([root / "conformance" / "slurmcluster.sh", "install"], check=True)
        edit(root / "examples" / "slurm" / "train.sbatch", work / "train.sbatch",
            ("mula launch ", f"mula launch {limits} "))  # fmt: skip

    def start(self, fault, variables):
        self.case += 1
        data = self.work / f"slurm-{self.case}"
        data.mkdir()
        self.variables = variables | {"SLURM_CONF": str(data / "slurm.conf")}
        environment = os.environ | self.variables
        self.controller = Host(data, "controller")
        self.hosts = [Host(data, address) for address in addresses]
        self.controller.start([root / "conformance" / "slurmcluster.sh", "run", data, *addresses], environment)

        def answer(*command):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            return None if done.returncode else done.stdout.strip()

        wait_for("slurmctld", lambda: (data / "munge.sock").exists() and answer("sinfo") is not None,
            self.controller.log)  # fmt: skip
        for host in self.hosts:
            host.start(["slurmd", "-D", "-N", host.name], environment)
        wait_for("the nodes", lambda: answer("sinfo", "-h", "-t", "idle", "-o", "%D") == "3", self.controller.log)
        bad = next(h for h in self.hosts if h.name == failing)
        if fault == "dead":
            bad.stop()
        elif fault == "silent":
            bad.signal(signal.SIGSTOP)

    def stop(self):
        for host in [*self.hosts, self.controller]:
            host.stop()

    def submit(self, config):
        """Returns the command that waits for a job, and its environment."""
        return [
            "sbatch", "--wait", "--no-kill", "--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10",
            "--signal=USR1@60", f"--output={config}.out", "train.sbatch", "--config", config,
        ], self.variables  # fmt: skip


# The hosts of each program that starts ranks, and the command of a run with its environment.
launchers = {
    "tcp": (Ssh, lambda c, config: (c.launch(config, "--remote-shell", c.shell), {})),
    "hot": (Ssh, lambda c, config: (c.launch(config, "--remote-shell", c.shell, "--hot-spares", "2"), {})),
    "hydra": (Ssh, lambda c, config: (c.launch(config, "--with", "mpiexec",
        "--mpiexec", f"mpiexec.mpich -launcher ssh -launcher-exec {c.shell}"), {})),
    "openmpi": (Ssh, lambda c, config: (c.launch(config, "--with", "mpiexec",
        "--mpiexec", f"mpiexec.openmpi --allow-run-as-root --mca plm_rsh_agent {c.shell}"), {})),
    "pals": (Ssh, Ssh.pals),
    "slurm": (Slurm, Slurm.submit),
}  # fmt: skip


def run(work, cluster, launcher, fault, want):
    """Runs a case, and returns None or what is wrong."""
    name = f"{launcher}-{fault}"
    variables = {}
    if fault == "wrong":
        variables["MULA_TEST_POISON"] = f"{failing} 3 53"
        if launcher != "slurm":
            # Hydra, Open MPI and PALS do not tell a rank the name of its host.
            variables["MULA_HOST"] = failing
    cluster.start(fault, variables)
    bad = next(h for h in cluster.hosts if h.name == failing)
    command, environment = launchers[launcher][1](cluster, f"{name}.yaml")
    with open(work / f"{name}.log", "w") as log:
        p = subprocess.Popen(command, cwd=work, stdout=log, stderr=log, env=os.environ | environment)
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
    cluster.stop()
    logs = [path for path in (work / f"{name}.log", work / f"{name}.yaml.out") if path.exists()]
    text = "".join(path.read_text() for path in logs)
    if code != 0:
        return f"exit code {code}\n{text[-3000:]}"
    attempts = [json.loads(line) for line in (work / name / "launch.jsonl").read_text().splitlines()]
    last = attempts[-1]
    # Not of the command: sbatch sees the end of the job later.
    first, end = (datetime.datetime.fromisoformat(t) for t in (attempts[0]["start"], last["end"]))
    seconds = (end - first).total_seconds()
    print(f"   {launcher}, {fault}: {len(attempts)} attempt(s) in {seconds:.1f} s: " +
          "; ".join(f"{a['outcome']} after step {a['step']}" for a in attempts), flush=True)  # fmt: skip
    if weights(work / name) != want:
        return "the weights differ from the weights of the unbroken run"
    if launcher == "hot" and fault in ("dies", "stops"):  # the other ranks go on
        replaced = last.get("replaced", [{}])
        if len(attempts) > 1 or len(replaced) > 1 or replaced[0].get("lost") != [failing] * 2 or \
                replaced[0]["hosts"] != [addresses[2]] * 2 or replaced[0]["from"] < 40:  # fmt: skip
            return f"the attempts are {json.dumps(attempts)}\n{text[-3000:]}"
        return None
    # The next attempt uses the spare, whatever the fault.
    if len(attempts) != 2 or attempts[0].get("blamed") != failing or failing in last["hosts"] or \
            addresses[2] not in last["hosts"]:  # fmt: skip
        return f"the attempts are {json.dumps(attempts)}\n{text[-3000:]}"
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
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        work = pathlib.Path(folder)
        os.chmod(work, 0o755)
        want = prepare(work, a.launchers, a.faults)
        os.environ["PATH"] = f"{work}:{os.environ['PATH']}:/usr/sbin"
        clusters, failed = {}, 0
        for launcher in a.launchers:
            kind = launchers[launcher][0]
            clusters[kind] = clusters.get(kind) or kind(work)
            for fault in a.faults:
                if what := run(work, clusters[kind], launcher, fault, want):
                    failed += 1
                    print(f"FAILED {launcher}, {fault}: {what}", flush=True)
        cases = len(a.launchers) * len(a.faults)
        if failed:
            sys.exit(f"{failed} of {cases} cases failed")
        print(f"{cases} cases in {time.monotonic() - began:.0f} s: "
            "the spare replaces the host, and the weights are equal")  # fmt: skip


main()
