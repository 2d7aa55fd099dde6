"""For scripts that continue the run of another framework in mula, and the run of mula in another
framework: frameworks.py, mcore.py.

The framework trains SAVED steps, saves a checkpoint, and trains on to step STEPS. mula imports the
checkpoint (mula import --config) and trains the same steps on the same batches. The first loss
depends on the weights, the following losses on the moments and the number of updates.

In the other direction, mula trains and exports the checkpoint of step SAVED (mula export --to), and
the framework trains the following steps.
"""

import json, os, socket, struct, sys, traceback

import torch

import training

TOLERANCE = 1e-5  # of a loss
SAVED, STEPS = 3, 6
BATCH, LENGTH = 4, 32
VOCABULARY = 512
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1  # of AdamW


def in_ranks(folder, ranks, work, *args):
    """Runs work in processes of a gloo group, with their output in files of a folder. Exits if one
    of them fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            code = 1
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                torch.distributed.init_process_group("gloo")
                work(*args)
                torch.distributed.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    if any(failed):
        sys.exit((folder / "rank0.log").read_text() + f"\na rank failed; see {folder}")


def safetensors(path):
    """The tensors of a safetensors file of fp32."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    return {
        name: torch.frombuffer(bytearray(data[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]]),
                               dtype=torch.float32).reshape(t["shape"])
        for name, t in json.loads(data[8 : 8 + n]).items() if name != "__metadata__"
    }


def batches_of(mula, work):
    """Makes a plan in work, and returns the batches of STEPS steps."""
    training.STEPS = 2 * STEPS
    return training.prepare(mula, work, BATCH, LENGTH)[1][:STEPS]


CONSTANT = f"{{name: constant, learning_rate: {RATE}, warmup_steps: 0}}"


def write_yaml(folder, model, groups="", more="", schedule=CONSTANT):
    """Writes the train.yaml of the run folder/run. groups are settings of the optimizer."""
    (folder / "train.yaml").write_text(
        f"""output: run
model: {model}
batch_size: {BATCH}
steps: {STEPS}
optimizer: {{name: adamw, betas: {list(BETAS)}, eps: {EPS}, weight_decay: {DECAY}, clip: 1.0{groups}}}
schedule: {schedule}
aux_loss: {{form: none, coefficient: 0.0}}
z_loss: {{coefficient: 0.0}}
threads: 1
{more}
"""
    )


def import_run(mula, folder, groups=""):
    """Imports the checkpoint in a folder as the first checkpoint of the run folder/run. groups are
    settings of the optimizer."""
    inspected = json.loads(training.run(mula, "import", "--from", folder, "--json"))
    write_yaml(folder, inspected["train_model"], groups, "plan: ../plan.json\ncheckpoint: {every: 0}")
    training.run(mula, "import", "--from", folder, "--config", folder / "train.yaml")


def losses_of(folder):
    """The losses of the run folder/run, by step."""
    with open(folder / "run" / "metrics.jsonl") as f:
        return {line["step"]: line["loss"] for line in map(json.loads, f) if "loss" in line}


def compare(ours, theirs):
    """Compares losses of the steps from SAVED on. Returns whether they are equal, and a text about
    them."""
    differences = [abs(ours[step] - theirs[step]) for step in range(SAVED, STEPS)]
    return max(differences) <= TOLERANCE, f"losses {theirs[SAVED:STEPS]}, differences {differences}"


def compare_losses(mula, folder, theirs):
    """Trains the imported run, and compares its losses with theirs, of all steps."""
    training.run(mula, "train", "--config", folder / "train.yaml")
    ours = losses_of(folder)
    equal, text = compare(ours, theirs)
    return equal and sorted(ours) == list(range(SAVED, STEPS)), text


def export_run(mula, folder, to, groups="", more="", schedule=CONSTANT, flags=()):
    """Trains a run of mula from the weights of the framework's checkpoint in folder, and exports
    its checkpoint of step SAVED into folder/back/exported, in the form to. groups are settings of
    the optimizer, more are settings of the run, flags are of mula export. Returns the losses by
    step."""
    back, model = folder / "back", folder / "hf"
    back.mkdir()
    if not model.exists():
        training.run(mula, "import", "--from", folder, "--output", model)
    inspected = json.loads(training.run(mula, "import", "--from", model, "--json"))
    write_yaml(back, inspected["train_model"], groups,
               f"plan: ../../plan.json\ninitialize_from: ../hf\ncheckpoint: {{every: {SAVED}, keep: 2}}\n{more}",
               schedule)
    training.run(mula, "train", "--config", back / "train.yaml")
    saved = back / "run" / "checkpoints" / f"step-{SAVED:08d}"
    training.run(mula, "export", "--model", saved, "--output", back / "exported", "--to", to, *flags)
    return losses_of(back)
