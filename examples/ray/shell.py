#!/usr/bin/env python3
"""A remote shell over Ray, for `mula launch --remote-shell`.

    shell.py HOST COMMAND

It runs COMMAND by sh on the Ray node with the address HOST, and passes standard input, output and
error through. Its exit code is the command's, or 255 if Ray has no such node or has lost it, as
with ssh. If this process ends, the command's standard input ends, and `mula launch --agent` then
ends its rank.
"""

import os
import queue
import signal
import subprocess
import sys
import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

UNREACHABLE = 255


# Ray would hide the GPUs of a node from an actor that reserves none. train.py has reserved them.
@ray.remote(num_cpus=0, max_concurrency=2, runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}})
class Command:
    def __init__(self, command: str):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(["sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe)

    def write(self, data: bytes) -> None:
        """Writes to standard input. No bytes are its end."""
        try:
            if data:
                self.process.stdin.write(data)
                self.process.stdin.flush()
            else:
                self.process.stdin.close()
        except BrokenPipeError:  # the command has ended
            pass

    @ray.method(num_returns="streaming")
    def output(self):
        """Yields pairs of a file descriptor and bytes, and at last the exit code."""
        pieces = queue.SimpleQueue()

        def read(descriptor, source):
            while data := os.read(source.fileno(), 1 << 16):
                pieces.put((descriptor, data))
            pieces.put(None)

        outputs = (1, self.process.stdout), (2, self.process.stderr)
        for output in outputs:
            threading.Thread(target=read, args=output, daemon=True).start()
        for _ in outputs:
            for piece in iter(pieces.get, None):  # Ray does not accept `yield from`
                yield piece
        code = self.process.wait()
        yield code if code >= 0 else 128 - code


def pass_input(command) -> None:
    data = b"first"
    while data:
        data = os.read(0, 1 << 16)
        ray.get(command.write.remote(data))


def main() -> int:
    host, text = sys.argv[1], " ".join(sys.argv[2:])
    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    # Of `ray job stop`: the launcher must end the ranks. ray.init sets a handler that ends the
    # process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == host]
    if not nodes:
        print(f"shell.py: no living node of Ray has the address {host}", file=sys.stderr)
        return UNREACHABLE
    try:
        command = Command.options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0], soft=False)).remote(text)
        threading.Thread(target=pass_input, args=[command], daemon=True).start()
        for piece in command.output.remote():
            piece = ray.get(piece)
            if isinstance(piece, int):
                return piece
            output = {1: sys.stdout.buffer, 2: sys.stderr.buffer}[piece[0]]
            output.write(piece[1])
            output.flush()
    except ray.exceptions.RayError as e:
        print(f"shell.py: {host}: {e}", file=sys.stderr)
    return UNREACHABLE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread may wait for input
