#!/usr/bin/env python3
"""Imports checkpoints of Megatron core and exports checkpoints to it, and compares weights, moments
and losses.

    conformance/environments.sh DIR megatron-0.16.1 && make build
    DIR/megatron-0.16.1/bin/python conformance/mcore.py [--case NAME…] [--write]

Megatron core's own GPTModel, DistributedDataParallel and DistributedOptimizer train a random model
on the CPU (gloo), as continuation.py describes. Weights and moments that mula imports must have the
bits of the optimizer's state.

In each case, mula also trains from the weights of Megatron core's checkpoint, with a cosine
schedule, and exports its checkpoint. Megatron core loads it, in some cases at another layout of
ranks, and saves it again. Weights and moments in this checkpoint must have the bits of mula's
checkpoint. Then Megatron core trains the next steps, with the schedule in the checkpoint.

Megatron core needs a GPU. This script replaces calls of CUDA by calls for the CPU, and the
processes that write files by threads. It does not change layers, optimizer or checkpoints.

Exits with 1 if a weight or moment differs, or a loss differs by more than 1e-5.

--write writes train/foreign/megatron/testdata/llama.json instead: the files of a tiny checkpoint,
and the SHA-256 of each of its tensors under the names of Hugging Face.
"""

import argparse, base64, contextlib, gzip, hashlib, json, os, pathlib
import queue, sys, tempfile, threading, types, warnings

os.environ["OMP_NUM_THREADS"] = "1"
warnings.filterwarnings("ignore")
import torch

torch.set_num_threads(1)


def without_cuda():
    """Makes Megatron core work on the CPU."""

    def on_cpu(make):
        return lambda *a, **k: make(*a, **{**k, "device": "cpu"} if k.get("device") == "cuda" else k)

    for name in ("tensor", "zeros", "empty", "full", "ones"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *a: None
    torch.Tensor.cuda = lambda self, *a, **k: self
    kind = torch.Tensor.type  # the optimizer accepts parameters with names of GPU types only

    def type_of(self, *a, **k):
        name = kind(self, *a, **k)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) and not a else name

    torch.Tensor.type = type_of


without_cuda()
import megatron.core
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

import training
from continuation import (BATCH, BETAS, DECAY, EPS, LENGTH, RATE, SAVED, STEPS, VOCABULARY, batches_of, compare,
                          compare_losses, export_run, import_run, in_ranks, safetensors)

random.CudaRNGStatesTracker.fork = lambda self, *a: contextlib.nullcontext()
moe_utils.te_general_gemm = None  # Transformer Engine's product of routers, which is not defined without it


class Threads:
    """The multiprocessing context of the writers of checkpoints."""

    Queue = JoinableQueue = queue.Queue
    Process = threading.Thread
    Manager = staticmethod(lambda: Threads)


filesystem_async.mp = types.SimpleNamespace(get_context=lambda name: Threads)

here = pathlib.Path(__file__).resolve().parent
PADDED = 640  # rows of the embedding
GROUPS = ", groups: [{match: [norms, biases], weight_decay: 0}]"

SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2,
             rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], intermediate_size=48, **SIZES)
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN2.pop("head_dim")
MIXTRAL = dict(model_type="mixtral", architectures=["MixtralForCausalLM"], intermediate_size=24, num_local_experts=4,
               num_experts_per_tok=2, sliding_window=None, **SIZES)
QWEN2_MOE = {**QWEN2, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
             "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1,
             "mlp_only_layers": [0], "num_hidden_layers": 3, "tie_word_embeddings": False}

# config.json, and the settings of Megatron core: ranks; tensor-parallel, pipeline-parallel and
# expert-parallel ranks among them; whether each layer has names of its own. The last are the
# settings that load an exported checkpoint, if they are others.
CASES = {
    "llama": (LLAMA, dict(), dict(ranks=2, pipeline=2)),
    "llama, 2 tensor-parallel ranks": (LLAMA, dict(ranks=2, tensor=2)),
    "llama, 2 data-parallel ranks, a name a layer": (LLAMA, dict(ranks=2, layers=True)),
    "qwen2": (QWEN2, dict(), dict(ranks=2, tensor=2)),
    "qwen3, tied embeddings": (QWEN3, dict()),
    "mixtral": (MIXTRAL, dict()),
    "mixtral, 2 expert-parallel ranks": (MIXTRAL, dict(ranks=2, experts=2)),
    "qwen2_moe": (QWEN2_MOE, dict(), dict(ranks=2, experts=2)),
    "qwen3_moe, a dense layer": (QWEN3_MOE, dict(), dict(ranks=2, experts=2)),
}


class Run:
    """A training run of Megatron core, as its training loop assembles the parts."""

    def __init__(self, config, tensor=1, experts=1, pipeline=1, layers=False, **_):
        parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=experts,
                                                 expert_tensor_parallel_size=1)
        torch.manual_seed(1)
        count, width = experts_of(config)
        dense = config.get("mlp_only_layers") or []
        shared = config.get("shared_expert_intermediate_size")
        moe = dict(num_moe_experts=count, moe_router_topk=config["num_experts_per_tok"],
                   moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
                   moe_ffn_hidden_size=width, moe_router_pre_softmax=not config.get("norm_topk_prob", True),
                   moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=bool(shared)) if count else {}
        if dense:
            moe["moe_layer_freq"] = [int(layer not in dense) for layer in range(config["num_hidden_layers"])]
        normed = config["model_type"].startswith("qwen3")
        settings = TransformerConfig(
            num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
            num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
            kv_channels=head_size(config), ffn_hidden_size=config["intermediate_size"], normalization="RMSNorm",
            layernorm_epsilon=config["rms_norm_eps"], gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, add_bias_linear=False,
            add_qkv_bias=config["model_type"].startswith("qwen2"), qk_layernorm=normed, hidden_dropout=0.0,
            attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
            masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor, expert_model_parallel_size=experts,
            pipeline_model_parallel_size=pipeline, pipeline_dtype=torch.float32, sequence_parallel=False,
            params_dtype=torch.float32, **moe)
        spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm")
        self.first, self.last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = GPTModel(config=settings, transformer_layer_spec=spec, vocab_size=PADDED, max_sequence_length=LENGTH,
                         position_embedding_type="rope", rotary_base=int(config["rope_theta"]),
                         share_embeddings_and_output_weights=config["tie_word_embeddings"],
                         pre_process=self.first, post_process=self.last)
        self.tensor, self.untied, self.width = tensor, not config["tie_word_embeddings"], config["hidden_size"]
        self.model = DistributedDataParallel(settings, DistributedDataParallelConfig(use_distributed_optimizer=True),
                                             model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
                            adam_eps=EPS, clip_grad=1.0, use_distributed_optimizer=True, params_dtype=torch.float32),
            [self.model])
        for group in self.optimizer.param_groups:  # as OptimizerParamScheduler does
            group["weight_decay"] = DECAY * group["wd_mult"]
        self.scheduler = None
        self.metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
                         "singleton_local_shards": False, "non_homogeneous_layers": layers}

    def pass_back(self, rows):
        """The mean loss of rows, without the padding of the vocabulary, after a backward pass. A
        pipeline has two stages."""
        rank, shape = torch.distributed.get_rank(), (LENGTH, len(rows), self.width)
        received = None
        if not self.first:
            received = torch.empty(shape)
            torch.distributed.recv(received, rank - 1)
            self.model.module.set_input_tensor(received.requires_grad_())
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        output = self.model(rows[:, :-1], torch.arange(LENGTH).expand(len(rows), LENGTH), mask)
        loss = torch.zeros(())
        if self.last:
            loss = self.loss(output.float(), rows)
            loss.backward()
        else:
            torch.distributed.send(output.detach(), rank + 1)
            gradient = torch.empty(shape)
            torch.distributed.recv(gradient, rank + 1)
            output.backward(gradient)
        if not self.first:
            torch.distributed.send(received.grad, rank - 1)
        return loss.detach().clone()

    def loss(self, logits, rows):
        if self.tensor > 1:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

            logits = gather_from_tensor_model_parallel_region(logits)
        return torch.nn.functional.cross_entropy(logits[..., :VOCABULARY].reshape(-1, VOCABULARY),
                                                 rows[:, 1:].reshape(-1))

    def advance(self, batches):
        """Trains on batches, and returns the mean losses."""
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        losses = []
        for batch in batches:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            mean = self.pass_back(batch.chunk(size)[rank])
            self.model.finish_grad_sync()
            done, _, _ = self.optimizer.step()
            assert done
            if self.scheduler:
                self.scheduler.step(BATCH)
            torch.distributed.all_reduce(mean)
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            losses.append(mean.item() * stages / torch.distributed.get_world_size())
        return losses

    def allocate(self):
        """Prepares the optimizer for loading. With the optimizer of torch, which Megatron core uses
        without Transformer Engine, its state must exist before a checkpoint is loaded. Megatron
        core gives all parameters the same tensor with the number of updates, which torch would
        increase once for each of them, and it expects this tensor among a parameter's tensors in
        the checkpoint, which its own checkpoints do not have."""
        for optimizer in self.optimizer.chained_optimizers:
            set_state = optimizer._set_main_param_and_optimizer_states

            def set_with_step(parameter, tensors, optimizer=optimizer, set_state=set_state):
                group, number = optimizer.model_param_group_index_map[parameter]
                state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][number]]
                state["step"] = state["step"].clone()
                set_state(parameter, {**tensors, "step": state["step"]})

            optimizer._set_main_param_and_optimizer_states = set_with_step
            for group in optimizer.optimizer.param_groups:
                for p in group["params"]:
                    optimizer.optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.full_like(p, torch.nan),
                                                    "exp_avg_sq": torch.full_like(p, torch.nan)}

    def state(self, step, loading=False):
        model = self.model.module.sharded_state_dict(metadata=self.metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=self.metadata)
        return {"model": model, "optimizer": optimizer, "iteration": step, "checkpoint_version": 3.0,
                "args": argparse.Namespace(consumed_train_samples=step * BATCH, norm_epsilon=1e-5, rotary_base=10000,
                                           untie_embeddings_and_output_weights=self.untied)}


def original(folder, config, settings, batches):
    run = Run(config, **settings)
    losses = run.advance(batches[:SAVED])
    checkpoint = folder / f"iter_{SAVED:07d}"
    checkpoint.mkdir(exist_ok=True)
    dist_checkpointing.save(run.state(SAVED), str(checkpoint))
    if torch.distributed.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        (folder / "config.json").write_text(json.dumps(config))
    losses += run.advance(batches[SAVED:])
    if torch.distributed.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def continued(folder, config, settings, batches):
    """Continues the checkpoint that mula has exported. Writes the losses, and saves the loaded
    checkpoint into folder/again."""
    exported = folder / "exported" / f"iter_{SAVED:07d}"
    run = Run(config, **settings)
    run.allocate()
    run.metadata = dist_checkpointing.load_content_metadata(str(exported))
    loaded = dist_checkpointing.load(run.state(0, loading=True), str(exported))
    run.model.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    run.scheduler = OptimizerParamScheduler(run.optimizer, 0.0, 1.0, 0.0, 0, 1, "constant", DECAY, DECAY, 0, "constant")
    run.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    assert loaded["iteration"] == SAVED and loaded["args"].consumed_train_samples == SAVED * BATCH
    for name in ("num_layers", "hidden_size", "kv_channels", "num_query_groups", "add_qkv_bias", "qk_layernorm"):
        assert getattr(loaded["args"], name) == getattr(run.model.config, name), name
    again = folder / "again"
    again.mkdir(exist_ok=True)
    dist_checkpointing.save(run.state(SAVED), str(again))
    losses = [None] * SAVED + run.advance(batches[SAVED:])
    if torch.distributed.get_rank() == 0:
        (folder / "continued.json").write_text(json.dumps(losses))


def head_size(config):
    return config["hidden_size"] // config["num_attention_heads"]


def experts_of(config):
    """The number of experts, or None, and their width."""
    return (config.get("num_local_experts", config.get("num_experts")),
            config.get("moe_intermediate_size", config["intermediate_size"]))


def renamed(config, get):
    """The tensors of Hugging Face, from get(name of Megatron core, layer)."""
    tensors = {"model.embed_tokens.weight": get("embedding.word_embeddings.weight")[:VOCABULARY],
               "model.norm.weight": get("decoder.final_layernorm.weight")}

    def network(prefix, fc1, fc2, names=("gate_proj", "up_proj", "down_proj")):
        for name, tensor in zip(names, [*fc1.chunk(2), fc2]):
            tensors[f"{prefix}{name}.weight"] = tensor

    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = get("output_layer.weight")[:VOCABULARY]
    size = head_size(config)
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = get("self_attention.linear_qkv.layer_norm_weight", layer)
        tensors[prefix + "post_attention_layernorm.weight"] = get("mlp.linear_fc1.layer_norm_weight", layer)
        tensors[prefix + "self_attn.o_proj.weight"] = get("self_attention.linear_proj.weight", layer)
        for kind in ["weight"] + ["bias"] * config["model_type"].startswith("qwen2"):
            qkv = get(f"self_attention.linear_qkv.{kind}", layer)
            qkv = qkv.reshape(groups, (heads + 2) * size, *qkv.shape[1:])
            for name, part in zip("qkv", qkv.split([heads * size, size, size], 1)):
                tensors[f"{prefix}self_attn.{name}_proj.{kind}"] = part.reshape(-1, *qkv.shape[2:])
        if config["model_type"].startswith("qwen3"):
            for name in "qk":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = get(f"self_attention.{name}_layernorm.weight", layer)
        count = experts_of(config)[0]
        if not count or layer in (config.get("mlp_only_layers") or []):
            network(prefix + "mlp.", get("mlp.linear_fc1.weight", layer), get("mlp.linear_fc2.weight", layer))
            continue
        block, names = prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            block, names = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
        tensors[block + "gate.weight"] = get("mlp.router.weight", layer)
        fc1 = get("mlp.experts.experts.linear_fc1.weight", layer)
        fc2 = get("mlp.experts.experts.linear_fc2.weight", layer)
        for e in range(count):
            network(f"{block}experts.{e}.", fc1[e], fc2[e], names)
        if config["model_type"] == "qwen2_moe":
            network(block + "shared_expert.", get("mlp.shared_experts.linear_fc1.weight", layer),
                    get("mlp.shared_experts.linear_fc2.weight", layer))
            tensors[block + "shared_expert_gate.weight"] = get("mlp.shared_experts.gate_weight", layer)
    return tensors


def load_all(checkpoint):
    """All tensors of a checkpoint, by torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader, load

    metadata = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    state = {name: torch.empty(tuple(t.size), dtype=t.properties.dtype) for name, t in metadata.items()
             if hasattr(t, "size")}
    load(state, storage_reader=FileSystemReader(str(checkpoint)), no_dist=True)
    return state


def state_of(config, tensors, prefix):
    """The tensors of a kind under Hugging Face's names."""

    def get(name, layer=None):
        if layer is None:
            return tensors[prefix + name]
        stacked = tensors.get(f"{prefix}decoder.layers.{name}")
        return stacked[layer] if stacked is not None else tensors[f"{prefix}decoder.layers.{layer}.{name}"]

    return renamed(config, get)


def differences(got, want):
    """The names of tensors that are not equal bit for bit."""
    return [n for n in sorted(got.keys() | want.keys())
            if n not in got or n not in want or not torch.equal(got[n].view(torch.int32),
                                                                want[n].contiguous().view(torch.int32))]


def write(work):
    """Writes the checkpoint for tests in Go."""
    global BATCH, LENGTH, VOCABULARY, PADDED
    BATCH, LENGTH, VOCABULARY, PADDED = 2, 8, 12, 16
    config = {**LLAMA, "vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 2, "intermediate_size": 12}
    rows = torch.arange((SAVED + 1) * BATCH * (LENGTH + 1)) % 7
    in_ranks(work, 1, original, work, config, {}, rows.reshape(-1, BATCH, LENGTH + 1))
    checkpoint = work / f"iter_{SAVED:07d}"
    tensors = load_all(checkpoint)
    sums = {
        kind: {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()
               for name, t in state_of(config, tensors, f"optimizer.state.{kind}.").items()}
        for kind in ("param", "exp_avg", "exp_avg_sq")
    }
    files = {f.name: base64.b64encode(gzip.compress(f.read_bytes(), mtime=0)).decode()
             for f in sorted(checkpoint.iterdir())}
    golden = {"made_by": f"conformance/mcore.py --write, megatron-core {megatron.core.__version__}, torch "
                         f"{torch.__version__}", "config": config, "sha256": sums, "gzip_base64": files}
    path = here.parent / "train" / "foreign" / "megatron" / "testdata" / "llama.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(golden, indent=1) + "\n")


def check(args, work, name, batches):
    """Runs a case, and returns its problems."""
    config, settings, *loading = CASES[name]
    folder = work / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    in_ranks(folder, settings.get("ranks", 1), original, folder, config, settings, batches)
    problems = []
    tensors = load_all(folder / f"iter_{SAVED:07d}")
    training.run(args.mula, "import", "--from", folder, "--output", folder / "hf")
    if wrong := differences(safetensors(folder / "hf" / "model.safetensors"),
                            state_of(config, tensors, "optimizer.state.param.")):
        problems.append(f"weights differ: {wrong[:3]}")
    import_run(args.mula, folder, GROUPS)
    saved = folder / "run" / "checkpoints" / f"step-{SAVED:08d}"
    moments = safetensors(saved / "optimizer.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        want = {f"{n}.{kind}": t for n, t in state_of(config, tensors, f"optimizer.state.{kind}.").items()}
        if wrong := differences({n: t for n, t in moments.items() if n.endswith("." + kind)}, want):
            problems.append(f"moments differ: {wrong[:3]}")
    equal, text = compare_losses(args.mula, folder, json.loads((folder / "losses.json").read_text()))
    if not equal:
        problems.append("losses differ")
    back, exported = check_export(args, folder, config, (loading or [settings])[0], batches)
    return problems + back, f"{text}; exported: {exported}"


def check_export(args, folder, config, settings, batches):
    """Exports a run of mula from the weights in folder, and returns the problems."""
    ours = export_run(args.mula, folder, "megatron", GROUPS,
                      schedule=f"{{name: cosine, learning_rate: {RATE}, warmup_steps: 2, decay_steps: {STEPS}}}",
                      flags=["--expert-parallel"] if settings.get("experts", 1) > 1 else [])
    back = folder / "back"
    in_ranks(back, settings.get("ranks", 1), continued, back, config, settings, batches)
    saved = back / "run" / "checkpoints" / f"step-{SAVED:08d}"
    ours_saved = {**safetensors(saved / "model.safetensors"), **safetensors(saved / "optimizer.safetensors")}
    theirs = load_all(back / "again")
    problems = []
    for kind, last in (("param", ""), ("exp_avg", ".exp_avg"), ("exp_avg_sq", ".exp_avg_sq")):
        want = {n + last: t for n, t in state_of(config, theirs, f"optimizer.state.{kind}.").items()}
        got = {n: t for n, t in ours_saved.items()
               if n.endswith(last) and (last or not n.endswith((".exp_avg", ".exp_avg_sq")))}
        if wrong := differences(got, want):
            problems.append(f"exported {kind} differs: {wrong[:3]}")
    equal, text = compare(ours, json.loads((back / "continued.json").read_text()))
    return problems + ([] if equal else ["losses after export differ"]), text


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    ap.add_argument("--keep", type=pathlib.Path, help="folder of all files, which stay")
    ap.add_argument("--write", action="store_true", help="write the data of tests")
    args = ap.parse_args()
    temporary = tempfile.TemporaryDirectory()
    work = args.keep or pathlib.Path(temporary.name)
    work.mkdir(parents=True, exist_ok=True)
    if args.write:
        return write(work)
    batches = batches_of(args.mula, work)
    print(f"megatron-core {megatron.core.__version__}, torch {torch.__version__}")
    failed = False
    for name in args.case:
        problems, text = check(args, work, name, batches)
        failed = failed or bool(problems)
        print(f"{'WRONG' if problems else 'equal'}  {name}: {'; '.join([*problems, text])}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
