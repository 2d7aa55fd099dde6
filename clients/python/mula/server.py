"""Starts `mula serve` on a unix socket, for as long as this process lives."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sysconfig
import tempfile
import weakref
from pathlib import Path

from mula.errors import Error

# The shell waits for the end of its input, a pipe of which this process has the other end, and then stops the server: it ends with this process
# however that ends, SIGKILL included, and leaves nothing behind. The server's first line goes to descriptor 3, of which nobody else keeps a copy, so
# that a server which ends without a word is seen to. It is killed, as it has nothing to finish: its only client is here, and does not read any more.
KEEPER = """
exec 3>&1 1>/dev/null
folder=$1
shift
"$@" >&3 3>&- </dev/null &
server=$!
exec 3>&-
cat >/dev/null
kill -KILL $server 2>/dev/null
wait $server
rm -f "$folder/errors" "$folder/s"
rmdir "$folder"
"""

LONGEST_SOCKET = 100  # bytes of a path; Linux takes 107, macOS 103


def program(mula: str | os.PathLike[str] | None) -> str:
    """The path of the program mula: the argument, the variable MULA, the PATH, or the environment's scripts."""
    named = os.fspath(mula) if mula else os.environ.get("MULA")
    name = named or "mula"
    found = shutil.which(name)
    if found is None and not named:
        found = shutil.which(name, path=sysconfig.get_path("scripts"))  # of an environment that is not activated
    if found is None:
        raise Error(
            f"there is no program {name}: build it (make build), and put it on the PATH or name it in the variable MULA"
        )
    return os.path.abspath(found)


class Server:
    """A running `mula serve` of one plan. It ends with `close`, with the last reference, or with this process."""

    def __init__(
        self,
        plan: str | os.PathLike[str],
        mula: str | os.PathLike[str] | None = None,
        shards: str | os.PathLike[str] | None = None,
    ):
        command = [program(mula), "serve", "--plan", os.fspath(plan), "--listen", ""]
        if shards is not None:
            command += ["--shards", os.fspath(shards)]
        folder = tempfile.mkdtemp(prefix="mula-")
        if len(os.fsencode(folder)) + 2 > LONGEST_SOCKET:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="mula-", dir="/tmp")
        self.socket = os.path.join(folder, "s")
        errors = Path(folder, "errors")
        with open(errors, "wb") as stderr:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", KEEPER, "mula", folder, *command, "--socket", self.socket],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self.owner = os.getpid()
        RUNNING.add(self)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = errors.read_text(errors="replace").strip()
        self._end = weakref.finalize(self, stop, self._process, self.owner)
        try:
            self.plan: str = json.loads(line)["plan"]
        except (ValueError, KeyError, TypeError):
            self._end()
            raise Error(f"`mula serve --plan {os.fspath(plan)}` did not start: {said or 'it said nothing'}") from None

    def ended(self) -> bool:
        """Whether the server has ended by itself: it says nothing after its first line, so that only the end of its output can be read."""
        return (
            self._process.stdout is None
            or self._process.stdout.closed
            or bool(select.select([self._process.stdout], [], [], 0)[0])
        )

    def close(self) -> None:
        """Stops the server."""
        self._end()


# Servers of this process. A forked process closes its copies of their pipes: the server would wait for their end, and `close` for the server.
RUNNING: weakref.WeakSet[Server] = weakref.WeakSet()


def forked() -> None:
    """Closes the pipes of servers of the process that this one was forked from."""
    for server in list(RUNNING):
        for pipe in (server._process.stdin, server._process.stdout):
            if pipe:
                pipe.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forked)


def stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the server, if it is this process's and not one that it was forked from."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.wait()
