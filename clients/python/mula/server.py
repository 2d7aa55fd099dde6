"""Starts `mula serve` on a unix socket, and stops it when this process ends."""

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

# The shell reads from a pipe until this process closes the other end, and then stops the server and
# removes its files. So the server ends with this process, even if the process is killed by SIGKILL.
# The server writes its first line to descriptor 3. No other process has a copy of this descriptor,
# so this process sees the end of file if the server ends without a message. SIGKILL is safe for the
# server: its only client is this process, which no longer reads.
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
    """Returns the path of the program mula.

    It looks at the argument, the variable MULA, the PATH, and the Python environment's scripts, in
    this order.
    """
    named = os.fspath(mula) if mula else os.environ.get("MULA")
    name = named or "mula"
    found = shutil.which(name)
    if found is None and not named:
        found = shutil.which(name, path=sysconfig.get_path("scripts"))  # of an environment that is not activated
    if found is None:
        raise Error(
            f"there is no program {name}; build it (make build), and add it to the PATH or set the variable MULA to "
            "its path"
        )
    return os.path.abspath(found)


class Server:
    """A running `mula serve` of one plan.

    `close` stops the server. It also ends with the last reference to this object, and with this
    process.
    """

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
            raise Error(f"`mula serve --plan {os.fspath(plan)}` did not start: {said or 'no error message'}") from None

    def ended(self) -> bool:
        """Reports whether the server has ended without `close`.

        The server writes only one line. If its output is readable after it, the end of file is
        there.
        """
        return (
            self._process.stdout is None
            or self._process.stdout.closed
            or bool(select.select([self._process.stdout], [], [], 0)[0])
        )

    def close(self) -> None:
        """Stops the server."""
        self._end()


# Servers of this process. A forked process closes its copies of their pipes. Otherwise the server
# would wait for the forked process to end, and `close` would wait for the server.
RUNNING: weakref.WeakSet[Server] = weakref.WeakSet()


def forked() -> None:
    """Closes this process's copies of the pipes of its parent's servers."""
    for server in list(RUNNING):
        for pipe in (server._process.stdin, server._process.stdout):
            if pipe:
                pipe.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forked)


def stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """Stops the server, unless it belongs to the process from which this one was forked."""
    if os.getpid() != owner:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.wait()
