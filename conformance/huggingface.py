"""Compares models of transformers with mula, in both directions.

    python conformance/huggingface.py [--mula bin/mula] [--count 24] [--seed 1] [--families llama]
    python conformance/huggingface.py --each 20                         20 models of each family

The script makes random tiny models of mula's families in transformers, as fp32, bf16 or fp16, in
one file or several, with separate or (if the release has them) fused experts. `mula import` and
conformance/forward, a short program over package moe, read each model. The checks are:

    logits     differ by less than 1e-5, in fp32 with the weights as stored
    gradients  of the mean cross entropy differ by less than 1e-4 of the gradient's norm, for each
               tensor
    export     AutoModelForCausalLM loads the files of `mula export`, and every weight is equal bit
               for bit after rounding to the requested type
    generate   50 greedy tokens with a key/value cache are equal
    predict    copies keep layers of multi-token prediction, which transformers does not load

For the other direction, mula tokenizes text and trains a model for some steps, in fp32 and in bf16.
transformers computes the same logits from the checkpoint and from the exported model. AutoTokenizer
returns the same ids as mula's tokenizer. bf16 weights are bit-identical after import and export.
Runs with transformers 4.57 and 5.23. Any difference ends the script with exit code 1.
"""

import argparse, copy, json, os, pathlib, random, shutil, subprocess, sys, tempfile
from unittest import mock
import tokenizers, torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

here = pathlib.Path(__file__).resolve().parent
FUSED = int(transformers.__version__.split(".")[0]) >= 5  # experts are one tensor in memory
LATENT = "deepseek_v2", "deepseek_v3"  # families with latent attention
GROUPS = *LATENT, "dots1", "glm4_moe"  # families with groups of experts
UNSCALED = "olmo", "olmoe", "olmo2"  # families without scaled rotary embeddings
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
worst = {"logits": 0.0, "gradients": 0.0}
counts = {"generated": 0, "predictions": 0}


def fail(text):
    print("WRONG:", text)
    sys.exit(1)


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        fail(f"{' '.join(str(c) for c in command)}\n{done.stderr}")
    return done.stdout


def per_expert(name, tensor):
    """Divides the experts of a parameter, or of its gradient."""
    if name.endswith("experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        for e in range(tensor.shape[0]):
            yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), tensor[e, :half]
            yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), tensor[e, half:]
    elif name.endswith("experts.down_proj"):
        for e in range(tensor.shape[0]):
            yield name.replace("down_proj", f"{e}.down_proj.weight"), tensor[e]
    else:
        yield name, tensor


GRANITE = {  # names in files of names in the memory of transformers 5
    ".router.weight": ".router.layer.weight",
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}


def transposed(name, tensor):
    """Divides the experts of a parameter of gpt_oss, or of its gradient.

    Matrices are [in, out], and columns of gate and up alternate.
    """
    prefix, last = name.rsplit(".", 1)
    kind = "bias" if last.endswith("_bias") else "weight"
    for e in range(tensor.shape[0]):
        part = tensor[e].movedim(-1, 0)
        if last.startswith("down"):
            yield f"{prefix}.{e}.down_proj.{kind}", part
        else:
            yield f"{prefix}.{e}.gate_proj.{kind}", part[::2]
            yield f"{prefix}.{e}.up_proj.{kind}", part[1::2]


def in_files(model, name, tensor):
    """Yields a parameter, or its gradient, with its names in files."""
    if model.config.model_type == "granitemoe":
        for old, new in GRANITE.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        yield name, tensor
        return
    if model.config.model_type == "gpt_oss":
        yield name, tensor
        return
    for key, part in per_expert(name, tensor):
        if FUSED and model.config.model_type == "mixtral":
            key = key.replace(".mlp.", ".block_sparse_moe.")
            for projection, number in ("gate", 1), ("down", 2), ("up", 3):
                key = key.replace(f".{projection}_proj.", f".w{number}.")
        yield key.replace(".gate.moe_statics.", ".moe_statics."), part


def in_mula(model, name, tensor):
    """Yields a parameter, or its gradient, with its names in mula's checkpoints."""
    if model.config.model_type == "gpt_oss" and ".experts." in name:
        yield from transposed(name, tensor)
        return
    for key, part in in_files(model, name, tensor):
        for old, new in GRANITE.items():
            if key.endswith(new):
                key = key.removesuffix(new) + old.replace(".router.", ".gate.")
        yield from per_expert(key, part)


def parameters(model):
    return {key: part.detach() for name, p in with_gradients(model) for key, part in in_files(model, name, p)}


def rounded(model, dtype):
    """Returns the parameters in files of a type.

    The routers of ernie4_5_moe are float32 in files of every type.
    """
    float32 = ".gate.weight" if model.config.model_type == "ernie4_5_moe" else None
    kept = {key for key in parameters(model) if float32 and key.endswith(float32)}
    return {key: w if key in kept else w.to(DTYPES[dtype]) for key, w in parameters(model).items()}


def with_gradients(model):
    """Yields the parameters that are trained: all but the correction biases."""
    return ((name, p) for name, p in model.named_parameters() if not name.endswith("e_score_correction_bias"))


def load(directory, dtype):
    # transformers 5 would use torch's grouped product, which needs sizes that are multiples of 16
    # bytes.
    options = {"dtype": dtype, "experts_implementation": "eager"} if FUSED else {"torch_dtype": dtype}
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(key):
            fail(f"{directory}: {key} {info[key]}")
    return model.eval()


def random_config(r, families):
    heads, head = r.choice([1, 2, 4]), r.choice([4, 8, 16])
    config = dict(
        vocab_size=r.randrange(40, 200),
        hidden_size=heads * head,
        num_attention_heads=heads,
        num_key_value_heads=r.choice([k for k in (1, 2, 4) if heads % k == 0]),
        num_hidden_layers=r.choice([1, 2, 3]),
        intermediate_size=r.choice([5, 8, 24]),
        tie_word_embeddings=r.random() < 0.3,
        pad_token_id=r.choice([None, 1]),
        bos_token_id=None,
        eos_token_id=2,
        max_position_embeddings=128,
    )
    theta = r.choice([10000.0, 500.0])
    family, scaling = r.choice(families), {"rope_type": "default"}
    if family not in UNSCALED:
        scaling = r.choice(
            ([scaling] if FUSED or family != "gpt_oss" else [])  # transformers 5 reads null in files of 4 as YaRN
            + [
                {"rope_type": "linear", "factor": r.choice([1.5, 4.0])},
                {"rope_type": "dynamic", "factor": 2.0},
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": r.choice([2.0, 4.0]),
                    "original_max_position_embeddings": r.choice([16, 64]),
                },
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
                | r.choice([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"attention_factor": 1.25}, {"truncate": False}]),
            ]
        )
    if family == "olmo3":
        theta = r.choice([theta, 500000.0]) if FUSED else 500000.0  # transformers 5 ignores rope_theta in windows
    if FUSED:
        config["rope_parameters"] = scaling | {"rope_theta": theta}
        if family == "olmo3":
            windows = {"rope_type": "default", "rope_theta": theta}
            config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": windows}
    else:
        config |= {"rope_theta": theta, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    if family in ("olmo", "olmoe"):
        config["clip_qkv"] = r.choice([None, None, 0.7])
    if family != "olmo":
        config["rms_norm_eps"] = r.choice([1e-6, 1e-5, 1e-3])
    if family not in ("olmo", "olmoe", "qwen2_moe", "granitemoe"):
        config["head_dim"] = r.choice([head, 4, 12, 32])
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = r.choice([None, 3, 8])
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {"use_sliding_window": r.random() < 0.5, "sliding_window": r.choice([3, 8])}
    if family in ("qwen2", "qwen3"):
        config["max_window_layers"] = r.choice([0, 1, 28])
    if family == "olmo3":
        config |= {"sliding_window": r.choice([2, 5, 16]), "num_hidden_layers": r.choice([1, 2, 4, 5])}
    if family == "qwen2_moe":
        config["shared_expert_intermediate_size"] = r.choice([4, 9, 24])
    if family in ("qwen2_moe", "qwen3_moe"):
        config["moe_intermediate_size"] = r.choice([5, 8, 24])
        layers = config["num_hidden_layers"]
        dense = r.sample(range(layers), r.randrange(layers))
        steps = [n for n in (1, 1, 2, 3) if any((l + 1) % n == 0 and l not in dense for l in range(layers))]
        config |= {"mlp_only_layers": dense, "decoder_sparse_step": r.choice(steps)}
    if family in ("olmoe", "qwen2_moe", "qwen3_moe", "flex_olmo"):
        config["norm_topk_prob"] = r.random() < 0.5
        config["num_experts"] = r.choice([1, 3, 8])
        config["num_experts_per_tok"] = r.randrange(1, config["num_experts"] + 1)
    if family == "gpt_oss":
        config |= {"sliding_window": r.choice([2, 5, 16]), "num_hidden_layers": r.choice([1, 2, 3])}
    if family in ("mixtral", "gpt_oss"):
        config["num_local_experts"] = r.choice([1, 3, 8])
        config["num_experts_per_tok"] = r.randrange(1, config["num_local_experts"] + 1)
    if family == "granitemoe":
        config["num_local_experts"] = r.choice([1, 3, 8])
        config["num_experts_per_tok"] = r.randrange(1, config["num_local_experts"] + 1)
        config["embedding_multiplier"] = r.choice([1.0, 12.0])
        config["attention_multiplier"] = r.choice([1.0, 0.015625, 0.3, head**-0.5])
        config["residual_multiplier"] = r.choice([1.0, 0.22])
        config["logits_scaling"] = r.choice([1.0, 6.0, 0.5])
        config["attention_bias"] = r.random() < 0.5
    if family == "dots1":
        config |= {"sliding_window": r.choice([None, 3, 8]), "max_window_layers": r.choice([0, 1, 62])}
    if family == "glm4_moe":
        config |= {"attention_bias": r.random() < 0.5, "use_qk_norm": r.random() < 0.5}
        rotated = r.choice([n for n in (1.0, 0.5, 0.25, 0.75) if config["head_dim"] * n % 2 == 0])
        (config["rope_parameters"] if FUSED else config)["partial_rotary_factor"] = rotated
        if scaling["rope_type"] == "dynamic" and config["head_dim"] * rotated == 2:
            (config["rope_parameters"] if FUSED else config)["partial_rotary_factor"] = 1.0  # divides by 0
    if family == "ernie4_5_moe":
        ernie(r, config)
    if family in GROUPS:
        groups(r, family, config)
    if family in LATENT:
        latent(r, family, config)
    return AutoConfig.for_model(family, **config)


def ernie(r, config):
    """Sets the fields of experts of ernie4_5_moe, so that a layer has experts."""
    layers, experts = config["num_hidden_layers"], r.choice([1, 3, 8])
    interval = r.randrange(1, layers + 1)
    sparse = [l for l in range(layers) if (l + 1) % interval == 0]
    config |= {
        "moe_num_experts": experts,
        "moe_k": r.randrange(1, experts + 1),
        "moe_num_shared_experts": r.choice([0, 1, 2]),
        "moe_intermediate_size": r.choice([5, 8, 24]),
        "moe_layer_interval": interval,
        "moe_layer_start_index": r.randrange(sparse[-1] + 1),
    }
    config["moe_layer_end_index"] = r.choice([-1, max(sparse[0], config["moe_layer_start_index"]), layers - 1])
    if not any(config["moe_layer_start_index"] <= l <= config["moe_layer_end_index"] for l in sparse):
        config["moe_layer_end_index"] = -1


def groups(r, family, config):
    """Sets the fields of routers with groups, and of shared experts."""
    groups = r.choice([1, 1, 2, 4])
    size, top = r.choice([2, 3, 4]), r.randrange(1, groups + 1)
    config |= {
        "n_routed_experts": groups * size,
        "num_experts_per_tok": r.randrange(1, min(8, top * size) + 1),
        "n_group": groups,
        "topk_group": top,
        "n_shared_experts": r.choice([1, 2]),
        "moe_intermediate_size": r.choice([5, 8, 24]),
        "routed_scaling_factor": r.choice([1.0, 2.5]),
    }
    config["first_k_dense_replace"] = r.randrange(config["num_hidden_layers"])
    if family == "deepseek_v2":
        config["topk_method"] = r.choice(["greedy", "group_limited_greedy"])
    else:
        config["norm_topk_prob"] = r.random() < 0.7


def latent(r, family, config):
    """Sets the fields of latent attention."""
    del config["head_dim"]
    rotated = r.choice([4, 8])
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": r.choice([None, 8, 12]),
        "kv_lora_rank": r.choice([8, 16]),
        "qk_nope_head_dim": r.choice([4, 6, 16]),
        "qk_rope_head_dim": rotated,
        "v_head_dim": r.choice([3, 8, 24]),
    }
    if family == "deepseek_v3":
        config["rope_interleave"] = r.random() < 0.7
    scaling = config.get("rope_parameters", config.get("rope_scaling")) or {}
    if scaling.get("rope_type") == "yarn" and "attention_factor" not in scaling:
        scaling |= r.choice([{}, {"mscale": 0.7, "mscale_all_dim": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.5}])
        if family == "deepseek_v2" and not FUSED:  # transformers 4 does not scale its scores
            scaling.pop("mscale_all_dim", None)


def has_experts(config):
    return hasattr(config, "num_experts_per_tok")


def exact(model, ids, change=0.0):
    """Returns the logits of a model in float64, with every weight changed by a random part of at
    most change.

    The code of transformers computes norms, softmax and rotary embeddings in float32. That name
    means float64 here.
    """
    double = mock.patch.multiple(torch, float=torch.float64, float32=torch.float64)
    with double, mock.patch.object(torch.Tensor, "float", torch.Tensor.double), torch.no_grad():
        model = copy.deepcopy(model).double()
        for p in model.parameters():
            p.mul_(1 + change * (2 * torch.rand_like(p) - 1))
        return model(ids, use_cache=False).logits


def clear(model, ids):
    """Reports whether rounding changes neither a choice of experts nor a logit by much.

    In a model with a few channels, a norm may divide by numbers near zero. In fp32 its logits can
    differ by more than 1e-5 from those in float64, in transformers and in mula. So the logits in
    fp32 must be near those in float64, and changing each weight by half a unit in its last place
    must not change them. transformers alone decides here which models are drawn again.
    """
    with torch.no_grad():
        want = exact(model, ids)
        near = [model(ids, use_cache=False).logits] + [exact(model, ids, 2**-24) for _ in range(3)]
    if any((logits - want).abs().max() > 2.5e-6 for logits in near):
        return False
    if not has_experts(model.config):
        return True
    if model.config.model_type in (*GROUPS, "gpt_oss"):
        return clear_choices(model, ids)
    out = model(ids, output_router_logits=True, use_cache=False)
    k, correction = model.config.num_experts_per_tok, [b for _, b in bias_tensors(model)]
    for number, logits in enumerate(out.router_logits):
        if k < logits.shape[-1]:
            p = logits.float().softmax(-1)
            p = (p + correction[number] if correction else p).sort(-1, descending=True).values
            if (p[:, k - 1] - p[:, k]).min() < 1e-5:
                return False
    return True


def biases(model):
    """Returns the correction biases of routers.

    transformers 4 rounds them to the type of the model.
    """
    return {key: b.float() for name, b in bias_tensors(model) for key, b in in_files(model, name, b)}


def bias_tensors(model):
    """Returns the correction biases of routers with their names."""
    tensors = [*model.named_buffers(), *((name, p.detach()) for name, p in model.named_parameters())]
    return [(name, b) for name, b in tensors if name.endswith("e_score_correction_bias")]


def clear_choices(model, ids):
    """Reports whether rounding changes no choice of a router with groups, or of gpt_oss."""
    inputs, config = [], model.config

    def keep(module, args, output):
        inputs.append((module, args[0].reshape(-1, config.hidden_size)))

    gates = [m for name, m in model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()

    def close(values, k):
        best = values.sort(-1, descending=True).values
        return k < values.shape[-1] and (best[:, k - 1] - best[:, k]).min() < 1e-5

    for gate, x in inputs:
        logits = x.float() @ gate.weight.float().T
        if config.model_type == "gpt_oss":
            if close((logits + gate.bias).softmax(-1).detach(), config.num_experts_per_tok):
                return False
            continue
        grouped = config.n_group > 1
        sigmoid = config.model_type != "deepseek_v2"
        if sigmoid:
            scores = logits.sigmoid() + gate.e_score_correction_bias
        else:
            scores, grouped = logits.softmax(-1), grouped and config.topk_method == "group_limited_greedy"
        if grouped:
            groups = scores.view(len(scores), config.n_group, -1)
            two = groups.topk(2).values
            values = two.sum(-1) if sigmoid else two[..., 0]
            if close(values, config.topk_group):
                return False
            kept = torch.zeros_like(values).scatter_(1, values.topk(config.topk_group).indices, 1).bool()
            scores = groups.masked_fill(~kept[..., None], -1.0).view(scores.shape)
        if close(scores.detach(), config.num_experts_per_tok):
            return False
    return True


def compare(tools, directory, reference, ids, what):
    """Compares mula's logits, gradients and greedy tokens for directory with the reference in fp32.
    """
    out = directory.parent / "forward.safetensors"
    run(
        tools / "forward",
        "-model",
        directory,
        "-ids",
        ",".join(map(str, ids[0].tolist())),
        "-generate",
        50,
        "-output",
        out,
    )
    mula = load_file(out)
    reference.zero_grad()
    logits = reference(ids[:, :-1], use_cache=False).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    difference = (logits.detach() - mula.pop("logits")).abs().max().item()
    if not difference < 1e-5:
        fail(f"{what}: logits differ by {difference}")
    if not abs(loss.item() - mula.pop("loss").item()) < 1e-5:
        fail(f"{what}: the loss differs")
    worst["logits"] = max(worst["logits"], difference)
    want, got = greedy(reference, ids, 50), mula.pop("generated").int().tolist()
    if got[: len(want)] != want:
        fail(f"{what}: greedy tokens {got}, transformers' {want}")
    counts["generated"] += len(want)
    rounding = 1e-7 * max(
        p.grad.norm().item() for p in reference.parameters() if p.grad is not None
    )  # terms that cancel out in small gradients, such as all of a router whose one weight is 1
    for name, p in with_gradients(reference):
        # transformers 4 skips experts without tokens
        for key, g in in_mula(reference, name, torch.zeros_like(p) if p.grad is None else p.grad):
            got, norm = mula.pop(key), g.norm().item()
            difference = (got - g).norm().item()
            if not difference <= 1e-4 * norm + rounding:
                fail(f"{what}: gradient of {key} differs by {difference}, its norm is {norm}")
            worst["gradients"] = max(worst["gradients"], difference / (norm + 1e4 * rounding))
    if mula:
        fail(f"{what}: gradients of other tensors than the model's: {list(mula)}")


def same_weights(want, got, what):
    if want.keys() != got.keys():
        fail(f"{what}: tensors in only one model: {sorted(want.keys() ^ got.keys())}")
    for key, w in want.items():
        if w.dtype != got[key].dtype or not torch.equal(w, got[key]):
            fail(f"{what}: {key} differs")


def stored(directory):
    return {
        k: v
        for f in sorted(directory.glob("*.safetensors"))
        if not f.name.startswith("optimizer")
        for k, v in load_file(f).items()
    }


def greedy(model, prompt, n):
    """Returns the greedy continuation, up to the first token with a nearly equally likely
    alternative.
    """
    model.generation_config.eos_token_id = None
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=n,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    two = torch.stack(out.logits)[:, 0].float().topk(2).values
    gap = two[:, 0] - two[:, 1] > 1e-4
    return out.sequences[0, prompt.shape[1] :].tolist()[: n if gap.all() else int(gap.long().argmin())]


def from_transformers(tools, tmp, r, number, families):
    config = random_config(r, families)
    dtype, shards, fused = (
        r.choice(list(DTYPES)),
        r.random() < 0.4,
        FUSED and has_experts(config) and r.random() < 0.4,
    )
    what = f"model {number}: {config.model_type} {dtype}{' sharded' if shards else ''}{' fused' if fused else ''}"
    ids = torch.tensor([[r.randrange(config.vocab_size) for _ in range(50)]])
    source = tmp / "source"
    while True:
        torch.manual_seed(r.randrange(2**32))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(0.7 * config.hidden_size**-0.5 / 0.02)
            for name, p in model.named_parameters():
                if name.endswith("_proj_bias"):  # of gpt_oss, so that some gates and ups are clamped
                    p.copy_((3 if "gate_up" in name else 0.2) * torch.randn_like(p))
                elif name.endswith(".down_proj") and config.model_type == "gpt_oss":
                    p.mul_(0.2)
            for _, b in bias_tensors(model):
                b.copy_(0.3 * torch.rand_like(b))
        kept = {name: p.data for name, p in model.named_parameters() if ".mlp.gate." in name or "moe_statics" in name}
        model = model.to(DTYPES[dtype])
        for name, p in model.named_parameters():
            if config.model_type == "ernie4_5_moe" and name in kept:
                p.data = kept[name]
        shutil.rmtree(source, ignore_errors=True)
        if fused:
            source.mkdir()
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(source)
            left_out = (
                {"lm_head.weight"} if config.tie_word_embeddings and number % 2 else {}
            )  # otherwise a tied head is stored, too
            save_file(
                {k: v.clone().contiguous() for k, v in model.state_dict().items() if k not in left_out},
                source / "model.safetensors",
                metadata={"format": "pt"},
            )
        else:
            model.save_pretrained(source, max_shard_size="20KB" if shards else "5GB")
        reference = load(source, torch.float32)
        if clear(reference, ids[:, :-1]):
            break
    text = json.loads(
        run(
            tools / "mula",
            "import",
            "--from",
            source,
            "--output",
            tmp / "imported",
            "--json",
            *(["--shard-size", "9k"] if r.random() < 0.5 else []),
        )
    )
    trained = sum(p.numel() for _, p in with_gradients(reference))
    whole = config.model_type in ("granitemoe", "gpt_oss")  # files have fused experts
    if text["parameters"] != trained or text["fused_experts"] != (fused or whole):
        fail(f"{what}: {text}")
    compare(tools, source, reference, ids, what)
    compare(tools, tmp / "imported", reference, ids, what + ", imported")
    same_weights(
        rounded(reference, dtype) | biases(reference),
        stored(tmp / "imported"),
        what + ", imported",
    )
    if config.model_type in ("deepseek_v3", "glm4_moe"):
        predictions(tools, tmp, r, source, config, dtype, what)
    for target in DTYPES:
        out = tmp / f"exported-{target}"
        run(
            tools / "mula",
            "export",
            "--model",
            tmp / "imported",
            "--output",
            out,
            "--dtype",
            target,
            "--shard-size",
            r.choice(["0", "9k", "5G"]),
        )
        kept = {k: v for k, v in stored(out).items() if k.endswith("e_score_correction_bias")}
        same_weights(biases(reference), kept, f"{what}, correction biases exported as {target}")
        loaded = parameters(load(out, "auto"))
        if config.model_type == "gpt_oss":  # transformers keeps norms in fp32
            loaded = {key: w.to(DTYPES[target]) for key, w in loaded.items()}
        same_weights(
            rounded(reference, target),
            loaded,
            f"{what}, exported as {target}",
        )
    print(f"equal: {what}")


def predictions(tools, tmp, r, source, config, dtype, what):
    """Checks that copies of a model keep layers of multi-token prediction, which transformers does
    not load. They have the tensors of a layer, norms and a projection (DeepSeek-V3, section 2.2),
    and may repeat embedding and head.
    """
    weights, h = stored(source), config.hidden_size
    last = f"model.layers.{config.num_hidden_layers - 1}."
    if not any(k.startswith(last + "mlp.experts.0.") for k in weights):
        return  # a dense layer, or fused experts
    embedding = weights["model.embed_tokens.weight"]
    layers = r.randint(1, 2)
    for k in range(layers):
        new = f"model.layers.{config.num_hidden_layers + k}."
        for name in [name for name in weights if name.startswith(last)]:
            weights[new + name[len(last) :]] = torch.randn_like(weights[name])
        for name, shape in ("enorm", [h]), ("hnorm", [h]), ("shared_head.norm", [h]), ("eh_proj", [h, 2 * h]):
            weights[f"{new}{name}.weight"] = torch.randn(shape, dtype=embedding.dtype)
        if r.random() < 0.5:
            weights[new + "embed_tokens.weight"] = embedding.clone()
        if r.random() < 0.5:
            weights[new + "shared_head.head.weight"] = weights.get("lm_head.weight", embedding).clone()
    more = tmp / "with-predictions"
    more.mkdir()
    save_file(weights, more / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    text["num_nextn_predict_layers"] = layers
    (more / "config.json").write_text(json.dumps(text))
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    want = {k: v.float() if k.endswith("e_score_correction_bias") else v for k, v in weights.items()}
    run(tools / "mula", "import", "--from", more, "--output", tmp / "kept")
    export = ("export", "--model", tmp / "kept", "--output", tmp / "again", "--dtype", dtype, "--shard-size", "9k")
    run(tools / "mula", *export)
    for copy in "kept", "again":
        same_weights(want, stored(tmp / copy), f"{what}, with {layers} layers of multi-token prediction")
        if json.loads((tmp / copy / "config.json").read_text())["num_nextn_predict_layers"] != layers:
            fail(f"{what}: num_nextn_predict_layers is not {layers}")
    counts["predictions"] += layers


def texts(r, documents):
    words = (
        "the of and to in a is that it was for on are as with his they at be this from have or by one had not but what "
        "all were when"
    ).split()
    for i in range(documents):
        yield json.dumps(
            {
                "id": str(i),
                "text": " ".join(words[r.randrange(8) * r.randrange(4)] for _ in range(r.randrange(40, 120))) + ".\n",
            }
        )


def trained(tools, tmp, r, precision):
    """Checks a model that mula has trained: in transformers, and back in mula."""
    tmp.mkdir()
    what = f"trained in {precision}"

    def mula(*command):
        return run(tools / "mula", *command, cwd=tmp)

    def export(model, output, dtype):
        mula("export", "--model", model, "--output", output, "--dtype", dtype)
        return tmp / output

    (tmp / "a.jsonl").write_text("".join(line + "\n" for line in texts(r, 100)))
    mula(
        "tokenizer",
        "train",
        "--vocab-size",
        "320",
        "--pattern",
        {"fp32": "gpt2", "bf16": "cl100k"}[precision],
        "--output",
        "tokenizer.json",
        "a.jsonl",
    )
    mula("tokenize", "--tokenizer", "tokenizer.json", "--output", "shards/a", "a.jsonl")
    (tmp / "blend.yaml").write_text(
        "sequence_length: 32\nvalidation: 0.1\nsources: [{name: a, shards: ['shards/a']}]\n"
    )
    mula("blend")
    common = f"plan: plan.json\ntokenizer: tokenizer.json\nprecision: {precision}\nbatch_size: 4\n"
    (tmp / "train.yaml").write_text(
        common + "model: {preset: mula-nano}\nsteps: 8\nschedule: {learning_rate: 0.01, warmup_steps: 2}\n"
    )
    mula("train")
    checkpoint = max((tmp / "run" / "checkpoints").iterdir())
    plain, rounded = export("run", "plain", "fp32"), export("run", "rounded", "bf16")

    tokenizer = AutoTokenizer.from_pretrained(plain)
    sample = "the of a zebra , 12345 Ünïcode 日本's <|endoftext|> end  .\n"
    ids = tokenizer(sample)["input_ids"]
    if (
        ids != tokenizers.Tokenizer.from_file(str(tmp / "tokenizer.json")).encode(sample).ids
        or tokenizer.decode(ids) != sample
    ):
        fail(f"{what}: AutoTokenizer returns {ids} for {sample!r}, and decodes {tokenizer.decode(ids)!r}")
    end = json.loads((checkpoint / "config.json").read_text())["eos_token_id"]
    if tokenizer.eos_token_id != end or tokenizer.eos_token != "<|endoftext|>":
        fail(f"{what}: the end of text is {tokenizer.eos_token!r}, {tokenizer.eos_token_id}")

    ids = torch.tensor(
        [tokenizer("the of and to in a is that it was for on are as with his they at be this")["input_ids"]]
    )
    for directory in (checkpoint, plain, rounded):
        compare(tools, directory, load(directory, torch.float32), ids, f"{what}, {directory.name}")
    weights = stored(checkpoint)
    same_weights(weights, parameters(load(plain, "auto")), f"{what}, exported as fp32")
    same_weights(
        {k: v.to(torch.bfloat16) for k, v in weights.items()},
        parameters(load(rounded, "auto")),
        f"{what}, exported as bf16",
    )
    mula("import", "--from", "rounded", "--output", "back", "--dtype", "fp32")
    same_weights(stored(rounded), stored(export("back", "again", "bf16")), f"{what}, bf16 there and back")

    # transformers saves it again, and mula resumes from it. At a tiny learning rate, the weights do
    # not change.
    load(rounded, "auto").save_pretrained(tmp / "saved")
    model = json.loads(mula("import", "--from", "saved", "--json"))["train_model"]
    (tmp / "more.yaml").write_text(
        common
        + f"output: more\ninitialize_from: saved\nmodel: {model}\nsteps: 1\noptimizer: {{weight_decay: 0}}\n"
        "schedule: {learning_rate: 1e-30, warmup_steps: 0}\n"
    )
    mula("train", "--config", "more.yaml")
    same_weights(
        {k: v.float() for k, v in stored(rounded).items()},
        stored(max((tmp / "more" / "checkpoints").iterdir())),
        f"{what}, initialize_from",
    )

    prompt = "the of and to"
    got = json.loads(
        mula("generate", "--model", "rounded", "--temperature", "0", "--max-tokens", "50", "--json", prompt)
    )["samples"][0]["tokens"]
    want = greedy(load(rounded, torch.float32), torch.tensor([tokenizer(prompt)["input_ids"]]), 50)
    if end in want:
        want = want[: want.index(end) + 1]
    if got[: len(want)] != want:
        fail(f"{what}: mula generate returns {got}, transformers {want}")
    print(f"equal: {what}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--count", type=int, default=24, help="random models")
    ap.add_argument("--each", type=int, default=0, help="random models of each family, instead of --count")
    ap.add_argument("--seed", type=int, default=1)
    families = ["olmoe", "olmoe", "olmo", "olmo2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe"]
    families += ["qwen2_moe", "mixtral", "flex_olmo", "olmo3", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"]
    families += ["ernie4_5_moe", "granitemoe", "gpt_oss"]
    ap.add_argument("--families", nargs="+", default=families, help="one is drawn per model")
    args = ap.parse_args()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        tools = tmp / "tools"
        tools.mkdir()
        shutil.copy(args.mula, tools / "mula")
        subprocess.run(
            ["go", "build", "-o", tools / "forward", "./conformance/forward"],
            cwd=here.parent,
            check=True,
            env={**os.environ, "CGO_ENABLED": "0"},
        )
        r = random.Random(args.seed)
        for precision in ("fp32", "bf16"):
            trained(tools, tmp / f"trained-{precision}", r, precision)
        drawn = [args.families] * args.count
        if args.each > 0:
            drawn = [[family] for family in dict.fromkeys(args.families) for _ in range(args.each)]
        for number, choices in enumerate(drawn):
            case = tmp / f"case-{number}"
            case.mkdir()
            from_transformers(tools, case, r, number, choices)
            shutil.rmtree(case)
    print(
        f"all equal; largest difference of logits {worst['logits']:.2g}, of gradients {worst['gradients']:.2g} of "
        f"their norm; {counts['generated']} tokens generated alike, {counts['predictions']} layers of multi-token "
        "prediction kept"
    )


if __name__ == "__main__":
    main()
