"""An S3 server on this machine, versitygw, behind the slow or failing link benchmarks/slowlink."""

import contextlib, json, os, pathlib, subprocess, time, urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEYS = {
    "AWS_ACCESS_KEY_ID": "user",
    "AWS_SECRET_ACCESS_KEY": "password123",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextlib.contextmanager
def running(versitygw, work, port, *link):
    """Serves the folders of work/store as buckets until the end of the block.

    Returns the URLs of the server and of the link, which listens at the next port. link are flags
    of slowlink.
    """
    program = str(work / "slowlink")
    subprocess.run(["go", "build", "-o", program, "./benchmarks/slowlink"], cwd=ROOT, check=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    urls = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    server = subprocess.Popen(
        [versitygw, "--quiet", "--port", f"127.0.0.1:{port}", "posix", work / "store"],
        env=os.environ
        | {"ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]},
        **quiet,
    )
    slow = subprocess.Popen([program, "-listen", f"127.0.0.1:{port + 1}", "-server", urls[0], *link], **quiet)
    try:
        time.sleep(2)
        yield urls
    finally:
        slow.kill()
        server.kill()


def stats(link):
    """Returns the counters of a link since the last call."""
    with urllib.request.urlopen(link + "/_stats") as r:
        return json.load(r)
