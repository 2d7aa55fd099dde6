#!/usr/bin/env python3
"""Validates the manifests of examples/kubernetes against the API of Kubernetes, JobSet and Kubeflow
Trainer, as the models of kubeflow-trainer-api 2.3.0 define it, without a cluster.

    pip install kubeflow-trainer-api==2.3.0 pyyaml
    go install sigs.k8s.io/kustomize/kustomize/v5@v5.7.1
    go install helm.sh/helm/v4/cmd/helm@v4.3.2
    conformance/kubernetes.py

kustomize and helm must be on the PATH. Unknown fields are errors. The number of pods must be
MULA_WORLD, and the layout of train.yaml must have as many ranks. With its own values, the chart
must give the documents of train/base. It must refuse wrong values.
"""
import json
import math
import pathlib
import subprocess
import sys

import yaml
from kubeflow_trainer_api import models

ROOT = pathlib.Path(__file__).parent.parent / "examples/kubernetes"
MODELS = {
    ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    ("v1", "ConfigMap"): models.IoK8sApiCoreV1ConfigMap,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
}


def unknown(path, given, known):
    """Yields the paths of fields that are in given, and not in known."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known:
                yield f"{path}.{name}"
            else:
                yield from unknown(f"{path}.{name}", value, known[name])
    elif isinstance(given, list) and isinstance(known, list):
        for i, (value, other) in enumerate(zip(given, known)):
            yield from unknown(f"{path}[{i}]", value, other)


def validate(name, text):
    """Returns the documents of a manifest by kind."""
    documents = {}
    for document in yaml.safe_load_all(text):
        kind = document["kind"]
        model = MODELS[document["apiVersion"], kind].from_dict(document)
        for path in unknown(f"{name}: {kind}", document, model.to_dict()):
            sys.exit(f"{path}: unknown field")
        documents[kind] = document
        print(f"{name}: {kind} {document['metadata']['name']}")
    return documents


def equal(name, *numbers):
    if len({int(n) for n in numbers}) != 1:
        sys.exit(f"{name}: the numbers of ranks differ: {numbers}")


def world(container):
    return next(e["value"] for e in container["env"] if e["name"] == "MULA_WORLD")


def ranks(config):
    layout = yaml.safe_load(config).get("layout", {})
    return math.prod(layout.get(axis, 1) for axis in ("expert_dp", "pp", "ep", "tp"))


def check_sizes(name, documents):
    """Compares the numbers of ranks in configuration and JobSet, and returns their number."""
    config = ranks(documents["ConfigMap"]["data"]["train.yaml"])
    jobs = documents["JobSet"]["spec"]["replicatedJobs"]
    for job in jobs:
        container = job["template"]["spec"]["template"]["spec"]["containers"][0]
        equal(f"{name}: {job['name']}", sum(j["replicas"] for j in jobs), world(container), config)
    return config


def build(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def chart(*settings):
    return build("helm", "template", "train", ROOT / "chart", *settings)


def check_chart(base):
    """Compares the chart with the documents of train/base, which have the same configuration."""
    own = validate("chart", chart())
    for kind in base:
        given, want = own[kind], base[kind]
        if kind == "ConfigMap":
            given, want = ({**d, "data": yaml.safe_load(d["data"]["train.yaml"])} for d in (given, want))
        if given != want:
            sys.exit(f"chart: {kind} differs from train/base:\n{yaml.dump(given)}\n{yaml.dump(want)}")
    config = ROOT / "train/overlays/large/train.yaml"
    pod = {"nodeSelector": {"pool": "large"}, "tolerations": [{"key": "pool", "operator": "Exists"}]}
    environment = [{"name": "AWS_REGION", "value": "eu"}]
    fields = f"pod={json.dumps(pod)},env={json.dumps(environment)}"
    large = validate("chart, other values", chart("--set-file", f"config={config}", "--set-json", fields))
    if check_sizes("chart, other values", large) != ranks(config.read_text()):
        sys.exit("chart: other ranks than in the configuration")
    for job in large["JobSet"]["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]["template"]["spec"]
        if any(spec[name] != pod[name] for name in pod) or environment[0] not in spec["containers"][0]["env"]:
            sys.exit(f"chart: {job['name']} lacks the fields of pod or env")
    single = validate("chart, one rank", chart("--set", "config=metrics_listen: 0.0.0.0:9400"))
    check_sizes("chart, one rank", single)
    for setting, message in [
        ("config=layout: {ep: 2}", "metrics_listen must be 0.0.0.0:9400"),
        ("config=a: [", "config is not YAML"),
        ("images=other", "images"),
        ("stepWithin=soon", "stepWithin"),
    ]:
        try:
            chart("--set", setting)
        except subprocess.CalledProcessError as e:
            if message not in e.stderr:
                sys.exit(f"chart: --set '{setting}': {e.stderr}")
        else:
            sys.exit(f"chart: --set '{setting}' is not refused")


def main():
    validate("tokenize.yaml", (ROOT / "tokenize.yaml").read_text())
    job = validate("index.yaml", (ROOT / "index.yaml").read_text())["Job"]["spec"]
    equal("index.yaml", job["completions"], job["parallelism"], world(job["template"]["spec"]["containers"][0]))

    built = {}
    for folder in ["train/base", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "train/overlays").iterdir())]:
        built[folder] = validate(folder, build("kustomize", "build", ROOT / folder))
        check_sizes(folder, built[folder])
    check_chart(built["train/base"])

    documents = validate("trainjob.yaml", (ROOT / "trainjob.yaml").read_text())
    trainer = documents["TrainJob"]["spec"]["trainer"]
    base = built["train/base"]["ConfigMap"]["data"]["train.yaml"]
    equal("trainjob.yaml", trainer["numNodes"], world(trainer), ranks(base))


if __name__ == "__main__":
    main()
