"""For scripts that continue the run of another framework in mula: frameworks.py, mcore.py.

The framework trains SAVED steps, saves a checkpoint, and trains on to step STEPS. mula imports the
checkpoint (mula import --config) and trains the same steps on the same batches. The first loss
depends on the weights, the following losses on the moments and the number of updates.
"""

import json, os, socket, sys, traceback

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


def batches_of(mula, work):
    """Makes a plan in work, and returns the batches of STEPS steps."""
    training.STEPS = 2 * STEPS
    return training.prepare(mula, work, BATCH, LENGTH)[1][:STEPS]


def import_run(mula, folder, groups=""):
    """Imports the checkpoint in a folder as the first checkpoint of the run folder/run. groups are
    settings of the optimizer."""
    inspected = json.loads(training.run(mula, "import", "--from", folder, "--json"))
    (folder / "train.yaml").write_text(
        f"""plan: ../plan.json
output: run
model: {inspected["train_model"]}
batch_size: {BATCH}
steps: {STEPS}
optimizer: {{name: adamw, betas: {list(BETAS)}, eps: {EPS}, weight_decay: {DECAY}, clip: 1.0{groups}}}
schedule: {{name: constant, learning_rate: {RATE}, warmup_steps: 0}}
aux_loss: {{form: none, coefficient: 0.0}}
z_loss: {{coefficient: 0.0}}
checkpoint: {{every: 0}}
threads: 1
"""
    )
    training.run(mula, "import", "--from", folder, "--config", folder / "train.yaml")


def compare_losses(mula, folder, theirs):
    """Trains the imported run. Returns whether its losses are theirs, and a text about them."""
    training.run(mula, "train", "--config", folder / "train.yaml")
    with open(folder / "run" / "metrics.jsonl") as f:
        ours = {line["step"]: line["loss"] for line in map(json.loads, f) if "loss" in line}
    differences = [abs(ours[step] - theirs[step]) for step in range(SAVED, STEPS)]
    equal = sorted(ours) == list(range(SAVED, STEPS)) and max(differences) <= TOLERANCE
    return equal, f"losses {theirs[SAVED:STEPS]}, differences {differences}"
