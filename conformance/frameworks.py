#!/usr/bin/env python3
"""Continues training states of DeepSpeed in mula and of mula in DeepSpeed, and compares the losses
of the next steps.

    conformance/environments.sh DIR deepspeed-0.19.8 && make build
    DIR/deepspeed-0.19.8/bin/python conformance/frameworks.py [--case NAME…]

DeepSpeed's own code trains a random model of transformers with two ranks on the CPU (gloo), as
continuation.py describes. In the cases of universal checkpoints, DeepSpeed's ds_to_universal
converts the checkpoint first.

In each case, mula also trains from the weights of DeepSpeed's checkpoint, and exports a universal
checkpoint. DeepSpeed loads it into a new engine with the same stage of ZeRO, and trains the next
steps. The optimizer's masters and moments after loading must have the bits of mula's checkpoint.

Exits with 1 if a loss differs by more than 1e-5, or a value differs.
"""

import argparse, json, os, pathlib, sys, tempfile

os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
import deepspeed, transformers
import deepspeed.comm.torch

from continuation import (BATCH, BETAS, DECAY, EPS, RATE, SAVED, VOCABULARY, batches_of, compare, compare_losses,
                          export_run, import_run, in_ranks, safetensors)

deepspeed.comm.torch.build_shm_op = lambda: None  # gloo alone; the extension takes minutes to compile

here = pathlib.Path(__file__).resolve().parent
RANKS = 2
ADAM = {"lr": RATE, "betas": BETAS, "eps": EPS}

SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2)


def llama(tied=False):
    return transformers.LlamaConfig(intermediate_size=50, tie_word_embeddings=tied, **SIZES)


def olmoe():
    return transformers.OlmoeConfig(intermediate_size=24, num_experts=4, num_experts_per_tok=2,
                                    output_router_logits=False, router_aux_loss_coef=0.0, **SIZES)


# Model, stage of ZeRO, and whether ds_to_universal converts the checkpoint.
CASES = {
    "llama, ZeRO 1": (llama, 1, False),
    "llama with tied embeddings, ZeRO 2": (lambda: llama(True), 2, False),
    "llama, ZeRO 3": (llama, 3, False),
    "OLMoE, ZeRO 2": (olmoe, 2, False),
    "llama, universal": (llama, 2, True),
}


def engine_of(config, stage, universal=False):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": DECAY},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, **ADAM), config=settings)[0]


def advance(engine, rank, batches, losses):
    """Trains on batches, a part on each rank, and appends the mean losses."""
    each = BATCH // RANKS
    for batch in batches:
        part = batch[rank * each : (rank + 1) * each]
        logits = engine(input_ids=part[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), part[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / RANKS)


def original(folder, config, stage, batches):
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    engine, losses = engine_of(config, stage), []
    advance(engine, rank, batches[:SAVED], losses)
    engine.save_checkpoint(str(folder))
    if rank == 0:
        config.save_pretrained(folder)
    advance(engine, rank, batches[SAVED:], losses)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def continued(folder, stage, batches):
    """Continues the checkpoint that mula has exported. Writes the losses, and the names of values
    that differ from the checkpoint of mula's run."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed(dist_backend="gloo")
    exported = folder / "exported"
    engine = engine_of(transformers.AutoConfig.from_pretrained(exported), stage, universal=True)
    path, _ = engine.load_checkpoint(str(exported))
    assert path and engine.global_steps == SAVED and engine.global_samples == SAVED * BATCH
    if stage == 3:  # one number for all groups, which torch's AdamW does not increase
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = torch.tensor(float(state["step"]))
    saved = folder / "run" / "checkpoints" / f"step-{SAVED:08d}"
    tensors = {**safetensors(saved / "model.safetensors"), **safetensors(saved / "optimizer.safetensors")}
    wrong = []
    for name, p in engine.module.named_parameters():
        for kind in ("", ".exp_avg", ".exp_avg_sq"):
            got = safe_get_full_optimizer_state(p, kind[1:]) if kind else safe_get_full_fp32_param(p)
            if got is None or not torch.equal(got, of_transformers(tensors, name, kind)):
                wrong.append(name + kind)
    losses = [None] * SAVED
    advance(engine, torch.distributed.get_rank(), batches[SAVED:], losses)
    if torch.distributed.get_rank() == 0:
        (folder / "continued.json").write_text(json.dumps({"losses": losses, "wrong": wrong}))


def of_transformers(tensors, name, kind):
    """A tensor of mula's checkpoint by its name in transformers 5."""
    prefix, _, last = name.partition(".mlp.experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if parts is None:
        return tensors[name + kind]
    experts = []
    while (expert := f"{prefix}.mlp.experts.{len(experts)}.") + f"{parts[0]}.weight" in tensors:
        experts.append(torch.cat([tensors[f"{expert}{part}.weight{kind}"] for part in parts]))
    return torch.stack(experts)


def to_universal(folder):
    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "latest").read_text()
    output = folder / f"{tag}_universal"
    sys.argv = ["ds_to_universal", "--input_folder", str(folder / tag), "--output_folder", str(output),
                "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    (folder / "latest").write_text(f"{tag}_universal")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    ap.add_argument("--keep", type=pathlib.Path, help="folder of all files, which stay")
    args = ap.parse_args()
    temporary = tempfile.TemporaryDirectory()
    work = args.keep or pathlib.Path(temporary.name)
    work.mkdir(parents=True, exist_ok=True)
    batches = batches_of(args.mula, work)
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    wrong = False
    for name in args.case:
        make, stage, universal = CASES[name]
        folder = work / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        config = make()
        in_ranks(folder, RANKS, original, folder, config, stage, batches)
        if universal:
            to_universal(folder)
        import_run(args.mula, folder)
        equal, text = compare_losses(args.mula, folder, json.loads((folder / "losses.json").read_text()))
        wrong = wrong or not equal
        print(f"{'equal' if equal else 'WRONG'}  {name}: {text}", flush=True)
        flags = ["--separate-experts"] if transformers.__version__ < "5" else []
        ours = export_run(args.mula, folder, "deepspeed", flags=flags)
        in_ranks(folder, RANKS, continued, folder / "back", stage, batches)
        result = json.loads((folder / "back" / "continued.json").read_text())
        equal, text = compare(ours, result["losses"])
        wrong = wrong or not equal or result["wrong"]
        print(f"{'WRONG' if not equal or result['wrong'] else 'equal'}  {name}, exported: {text}, "
              f"values that differ: {result['wrong']}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
