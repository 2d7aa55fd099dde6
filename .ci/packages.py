"""Checks parts of release files for .ci/packages:

packages.py sbom SBOM PROGRAM MODULES
    the SBOM has the program and all modules of `go version -m`, and no others
packages.py licences TEXT MODULES
    the text has a licence of each module
packages.py client VERSION PLAN SAMPLES
    the installed client has the version and reads the plan
packages.py image OCI DOCKER ARCH VERSION FOLDER
    both archives have one valid image; its layers are unpacked
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zlib


def check(ok, message):
    if not ok:
        sys.exit("packages: " + message)


def modules(listing):
    """Returns Go's version and the pairs of module and version of `go version -m`."""
    with open(listing) as f:
        lines = f.read().splitlines()
    found = []
    for line in lines[1:]:
        fields = line.split("\t")
        if fields[1] == "dep":
            found.append((fields[2], fields[3]))
        elif fields[1] == "=>":
            found[-1] = (fields[2], fields[3])
    check(found, f"{listing}: no modules")
    return lines[0].rsplit(" ", 1)[1], found


def sbom(name, program, listing):
    with open(name) as f:
        bom = json.load(f)
    check(bom["bomFormat"] == "CycloneDX", f"{name}: bomFormat {bom['bomFormat']}")
    go, expected = modules(listing)
    got = [(c["name"], c["version"]) for c in bom["components"]]
    check(sorted(got) == sorted(expected + [("std", go)]), f"{name}: components {got}, want std {go} and {expected}")
    with open(program, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    hashes = {h["alg"]: h["content"] for h in bom["metadata"]["component"]["hashes"]}
    check(hashes == {"SHA-256": digest}, f"{name}: hashes {hashes}, want {digest}")
    check(all(c.get("hashes") for c in bom["components"] if c["name"] != "std"), f"{name}: a module has no hash")
    print(f"{os.path.basename(name)}: {len(got)} components")


def licences(name, listing):
    with open(name, encoding="utf-8") as f:
        text = f.read()
    rule = "=" * 80
    sections = [s.strip().split("\n") for s in text.split(rule)[1:]]
    heads = [(head[0], head[1]) for head in sections[::2]]
    go, expected = modules(listing)
    for module, version in [("Go's standard library and runtime", go)] + expected:
        files = [f for head, f in heads if head == f"{module} {version}"]
        check(
            any("licen" in f.lower() or "copying" in f.lower() for f in files),
            f"{name}: no licence of {module} {version}",
        )
    for (head, file), body in zip(heads, sections[1::2]):
        # A notice may be a single line, as in smithy-go. A licence has more text.
        least = 20 if file.rpartition("/")[2].lower().startswith("notice") else 100
        check(len("".join(body)) > least, f"{name}: {file} of {head} has no text")
    check(
        len({head for head, _ in heads}) == len(expected) + 1, f"{name}: a licence of a module that the program lacks"
    )


def client(version, plan, samples):
    import mula
    from pip._vendor.packaging.version import Version

    printed = json.loads(subprocess.run(["mula", "version", "--json"], check=True, capture_output=True).stdout)
    check(printed["version"] == version, f"mula version: {printed['version']}, want {version}")
    check(Version(mula.__version__) == Version(version), f"mula.__version__: {mula.__version__}, want {version}")
    rows = 0
    for batch in mula.Stream(plan, batch_size=64):
        check(batch.tokens.shape[1] == 129, f"batch of shape {batch.tokens.shape}")
        rows += batch.tokens.shape[0]
    check(rows == int(samples), f"mula.Stream: {rows} samples, want {samples}")
    print(f"import mula: version {mula.__version__}, {rows} samples read")


def image(oci, docker, arch, version, folder):
    with tarfile.open(oci) as f:
        members = {m.name: f.extractfile(m).read() for m in f if m.isfile()}
    check(json.loads(members["oci-layout"])["imageLayoutVersion"] == "1.0.0", f"{oci}: oci-layout")

    def blob(descriptor):
        algorithm, digest = descriptor["digest"].split(":")
        data = members[f"blobs/{algorithm}/{digest}"]
        check(
            hashlib.new(algorithm, data).hexdigest() == digest and len(data) == descriptor["size"],
            f"{oci}: damaged blob {digest}",
        )
        return data

    (outer,) = json.loads(members["index.json"])["manifests"]
    index = json.loads(blob(outer))
    manifests = {m["platform"]["architecture"]: json.loads(blob(m)) for m in index["manifests"]}
    check(sorted(manifests) == ["amd64", "arm64"], f"{oci}: platforms {sorted(manifests)}")
    for name, manifest in manifests.items():
        config = json.loads(blob(manifest["config"]))
        check((config["os"], config["architecture"]) == ("linux", name), f"{oci}: platform of the config for {name}")
        settings = config["config"]
        want = {
            "Entrypoint": ["/usr/bin/mula"],
            "User": "65532:65532",
            "WorkingDir": "/work",
            "Env": ["PATH=/usr/bin", "HOME=/tmp"],
        }
        got = {key: settings.get(key) for key in want}
        check(got == want, f"{oci}: config for {name} {got}, want {want}")
        label = settings["Labels"]["org.opencontainers.image.version"]
        check(label == version, f"{oci}: version {label}, want {version}")
        layers = [zlib.decompress(blob(layer), 31) for layer in manifest["layers"]]
        digests = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
        check(digests == config["rootfs"]["diff_ids"], f"{oci}: layers for {name} differ from diff_ids")
        if name == arch:
            chosen, unpacked = manifest, layers

    with tarfile.open(docker) as f:
        (loaded,) = json.load(f.extractfile("manifest.json"))
        config = f.extractfile(loaded["Config"]).read()
        check(
            "sha256:" + hashlib.sha256(config).hexdigest() == chosen["config"]["digest"],
            f"{docker}: another config than {oci}",
        )
        digests = ["sha256:" + hashlib.sha256(f.extractfile(layer).read()).hexdigest() for layer in loaded["Layers"]]
        check(digests == [layer["digest"] for layer in chosen["layers"]], f"{docker}: other layers than {oci}")
    check(loaded["RepoTags"] == ["mula:" + version.replace("+", "_")], f"{docker}: tags {loaded['RepoTags']}")

    os.mkdir(folder)
    for layer in unpacked:
        unpack(layer, folder)
    print(f"{os.path.basename(oci)}: entrypoint, user, environment and layers are right; unpacked linux/{arch}")


def unpack(layer, folder):
    import io

    with tarfile.open(fileobj=io.BytesIO(layer)) as f:
        for member in f:
            parts = member.name.rstrip("/").split("/")
            check(".." not in parts and parts[0], f"layer: name {member.name}")
            check(member.isfile() or member.isdir(), f"layer: {member.name} is neither a file nor a folder")
            check(not parts[-1].startswith(".wh."), f"layer: {member.name} removes a file")
            target = os.path.join(folder, *parts)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
            else:
                with open(target, "wb") as out:
                    out.write(f.extractfile(member).read())
            os.chmod(target, member.mode)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
