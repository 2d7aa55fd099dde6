#!/usr/bin/env python3
"""Validates the manifests of examples/kubernetes against the API of Kubernetes, JobSet and Kubeflow
Trainer, as the models of kubeflow-trainer-api 2.3.0 define it, without a cluster.

    pip install kubeflow-trainer-api==2.3.0 pyyaml
    conformance/kubernetes.py [KUSTOMIZE]

KUSTOMIZE is the program with which the base and the overlays are built. Without it, kustomize must
be on the PATH. Unknown fields are errors. The number of pods must be MULA_WORLD, and the layout of
train.yaml must have as many ranks.
"""
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
    layout = yaml.safe_load(config)["layout"]
    return layout.get("expert_dp", 1) * layout.get("pp", 1) * layout.get("ep", 1)


def main():
    kustomize = sys.argv[1] if len(sys.argv) > 1 else "kustomize"
    validate("tokenize.yaml", (ROOT / "tokenize.yaml").read_text())
    job = validate("index.yaml", (ROOT / "index.yaml").read_text())["Job"]["spec"]
    equal("index.yaml", job["completions"], job["parallelism"], world(job["template"]["spec"]["containers"][0]))

    base = None
    for folder in ["train/base", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "train/overlays").iterdir())]:
        built = subprocess.run([kustomize, "build", ROOT / folder], check=True, capture_output=True, text=True).stdout
        documents = validate(folder, built)
        config = ranks(documents["ConfigMap"]["data"]["train.yaml"])
        base = base or config
        jobs = documents["JobSet"]["spec"]["replicatedJobs"]
        for job in jobs:
            container = job["template"]["spec"]["template"]["spec"]["containers"][0]
            equal(f"{folder}: {job['name']}", sum(j["replicas"] for j in jobs), world(container), config)

    documents = validate("trainjob.yaml", (ROOT / "trainjob.yaml").read_text())
    trainer = documents["TrainJob"]["spec"]["trainer"]
    equal("trainjob.yaml", trainer["numNodes"], world(trainer), base)


if __name__ == "__main__":
    main()
