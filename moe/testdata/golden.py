"""Makes the golden files of package moe with Hugging Face transformers.

Run in this directory; needs torch, transformers, safetensors. With names of cases or directories as
arguments, it makes only their files.

A formula (below, and in golden_test.go) makes the weights of the cases, so only results are stored:

<case>.safetensors
    Ids, logits at every fourth position, losses, and a summary of each gradient: norm, four dot
    products with vectors of the formula, and up to 64 elements. The configuration is in the
    metadata.
olmoe-documents.safetensors
    The same for one batch whose rows are documents and padding. A block-diagonal causal mask keeps
    attention within documents. A target counts (is not -100) if it is in the document of its input.
    `document` has the document number of each token, -1 for padding.
hf-*/
    Small model directories as transformers (or its state_dict) writes them, with expected logits.
"""

import json, os, shutil, sys
import numpy as np, torch, transformers, safetensors
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import GptOssConfig, GptOssForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM
from transformers import OlmoConfig, OlmoeConfig, OlmoeForCausalLM, OlmoForCausalLM
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

torch.set_num_threads(1)
VERSIONS = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "safetensors": safetensors.__version__,
    "python": sys.version.split()[0],
}
# transformers has no losses of their routers. Its loss of ernie4_5_moe counts choices without
# biases.
NO_LOSSES = "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "ernie4_5_moe"
ROWS, LENGTH = 2, 80
PACKED = [[30, 40, 1, 10], [66, 5]]  # lengths of documents: a row without padding, a row with 10 padding tokens


def mix(x):
    """Applies the 32-bit finaliser of MurmurHash3 to an array of uint32."""
    x = x.copy()
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def uniform(name, n):
    """Returns n numbers in [-0.5, 0.5) with 24 bits, which depend only on the name."""
    h = 0x811C9DC5
    for b in name.encode():
        h = (h ^ b) * 0x01000193 & 0xFFFFFFFF
    i = np.arange(n, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = mix(mix(i + np.uint32(h)) ^ np.uint32(h))
    return ((x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)).astype(np.float32)


def formula(name, shape):
    """Returns the weight of a name.

    Matrices are in [-0.2, 0.2) and norms around 1. Routers are wider, so that choices are clear.
    """
    u = uniform(name, int(np.prod(shape)))
    if name.endswith(("gate_proj.bias", "up_proj.bias")):  # some gates and ups of gpt_oss are clamped
        v = np.float32(32) * ((np.float32(1) + np.float32(0.5) * u) - np.float32(1))
    elif len(shape) == 1:
        v = np.float32(1) + np.float32(0.5) * u
    elif name.endswith("e_score_correction_bias"):
        v = np.float32(0.5) * u
    elif name.endswith((".gate.weight", ".router.weight")):
        v = np.float32(1.0) * u
    else:
        v = np.float32(0.4) * u
    return torch.from_numpy(v.astype(np.float32).reshape(shape))


def views(model):
    """Maps the per-expert names in files to (parameter, index) of the model in memory."""
    out = {}
    for name, p in model.named_parameters():
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            out |= transposed(name, p)
        elif name.endswith("experts.gate_up_proj"):
            i = p.shape[1] // 2
            for e in range(p.shape[0]):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = (p, (e, slice(0, i)))
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = (p, (e, slice(i, 2 * i)))
        elif name.endswith("experts.down_proj"):
            for e in range(p.shape[0]):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = (p, (e,))
        else:
            out[name.replace(".gate.moe_statics.", ".moe_statics.")] = (p, ())
    if model.config.model_type == "mixtral":
        return {mixtral(name): view for name, view in out.items()}
    if model.config.model_type == "granitemoe":
        return {name.replace(".router.weight", ".gate.weight"): view for name, view in out.items()}
    return out


def transposed(name, p):
    """Returns the views of a parameter of the experts of gpt_oss, which is [in, out].

    Columns of gate and up alternate.
    """
    prefix, last = name.rsplit(".", 1)
    kind = "bias" if last.endswith("_bias") else "weight"
    parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    if last.startswith("down"):
        parts = {"down_proj": slice(None)}
    views = {}
    for e in range(p.shape[0]):
        for part, columns in parts.items():
            views[f"{prefix}.{e}.{part}.{kind}"] = (p, (e, columns) if kind == "bias" else (e, ..., columns, "T"))
    return views


def select(tensor, index):
    """Returns a view of a tensor; the index of a transposed view ends with "T"."""
    if index and isinstance(index[-1], str):
        return tensor[index[:-1]].T
    return tensor[index]


def mixtral(name):
    """Returns the name in Mixtral's files."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for part, number in ("gate", 1), ("down", 2), ("up", 3):
        name = name.replace(f".{part}_proj.", f".w{number}.")
    return name


def fill(model):
    with torch.no_grad():
        for name, (p, index) in views(model).items():
            select(p, index).copy_(formula(name, tuple(select(p, index).shape)))
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.from_numpy(np.float32(0.5) * uniform(name, bias.numel())))
    if model.config.pad_token_id is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[model.config.pad_token_id] = 0


def summary(name, g):
    g = g.detach().double().numpy().reshape(-1)
    dots = [float(g @ uniform(f"dot{i} " + name, g.size).astype(np.float64)) for i in range(4)]
    stride = max(1, g.size // 64)
    return torch.tensor([np.linalg.norm(g)] + dots + list(g[::stride][:64]), dtype=torch.float32)


def case(file, family, **fields):
    if len(sys.argv) > 1 and file not in sys.argv[1:]:
        return
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    fill(model)
    v = config.vocab_size
    ids = torch.from_numpy(
        (mix(np.arange(ROWS * (LENGTH + 1), dtype=np.uint32) + np.uint32(7)) % np.uint32(v)).astype(np.int64)
    ).reshape(ROWS, LENGTH + 1)
    if config.pad_token_id is not None:
        ids[0, 3] = ids[1, 40] = config.pad_token_id
    moe = hasattr(config, "num_experts_per_tok") and family not in NO_LOSSES
    out = {"ids": ids.float()}

    def run(aux, z):
        model.zero_grad()
        kw = {"output_router_logits": True} if moe else {}
        r = model(input_ids=ids[:, :-1], use_cache=False, **kw)
        ce = torch.nn.functional.cross_entropy(r.logits.reshape(-1, v), ids[:, 1:].reshape(-1))
        loss = ce
        if moe:
            e = config.num_local_experts if family == "granitemoe" else config.num_experts
            k, layers, t = config.num_experts_per_tok, len(r.router_logits), ROWS * LENGTH
            for row in r.router_logits:  # releases that return softmaxed values here compute another loss
                assert (row.sum(-1) - 1).abs().max() > 1e-3, "router_logits are probabilities in this release"
            p = [l.softmax(-1) for l in r.router_logits]
            gap = min(
                (q.sort(-1, descending=True).values[:, k - 1] - q.sort(-1, descending=True).values[:, k]).min().item()
                for q in p
            )
            assert gap > 1e-5, f"routing of {file} is too close to a tie: {gap}"
            counts = [torch.zeros(e).scatter_add_(0, q.topk(k, -1).indices.reshape(-1), torch.ones(t * k)) for q in p]
            hf = load_balancing_loss_func(r.router_logits, e, k)
            assert torch.equal(hf, r.aux_loss)
            mb = e / (layers * t * k) * sum((c * q.mean(0)).sum() for c, q in zip(counts, p))
            zl = sum((torch.logsumexp(l, -1) ** 2).sum() for l in r.router_logits) / (layers * t * k)
            out.update(
                aux_hf=hf.detach().reshape(1),
                aux_megablocks=mb.detach().reshape(1),
                z=zl.detach().reshape(1),
                counts=torch.stack(counts),
            )
            loss = loss + {"none": 0, "hf": 0.5 * hf, "megablocks": 0.5 * mb}[aux] + z * zl
        out["loss"] = ce.detach().reshape(1)
        out["logits"] = r.logits.detach()[:, ::4].contiguous()
        loss.backward()
        for name, (p, index) in views(model).items():
            if p.requires_grad:
                out[f"{aux} {name}"] = summary(name, select(p.grad, index))

    run("none", 0)
    if moe:
        run("hf", 0)
        run("megablocks", 0.1)
    save_file(
        out, file + ".safetensors", metadata={"config": json.dumps(config.to_dict()), "versions": json.dumps(VERSIONS)}
    )


def documents(file, config, lengths):
    """A batch of packed rows.

    The model accepts the four-dimensional mask, but its load-balancing loss does not. So the loss
    is computed here from the routers' logits. Padding is routed like all other tokens.
    """
    if len(sys.argv) > 1 and file not in sys.argv[1:]:
        return
    model = OlmoeForCausalLM(config).eval()
    fill(model)
    v, width = config.vocab_size, LENGTH + 1
    ids = torch.from_numpy(
        (mix(np.arange(len(lengths) * width, dtype=np.uint32) + np.uint32(99)) % np.uint32(v)).astype(np.int64)
    ).reshape(-1, width)
    of = torch.tensor([sum(([i] * n for i, n in enumerate(row)), []) + [-1] * (width - sum(row)) for row in lengths])
    ids[of < 0] = 2
    inputs, targets = of[:, :-1], of[:, 1:]
    seen = (inputs[:, :, None] == inputs[:, None, :]) & torch.ones(LENGTH, LENGTH).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    labels = ids[:, 1:].masked_fill((targets != inputs) | (targets < 0), -100)
    r = model.model(input_ids=ids[:, :-1], attention_mask=mask, use_cache=False, output_router_logits=True)
    logits = model.lm_head(r.last_hidden_state)
    alone = model(
        input_ids=ids[:1, lengths[0][0] : sum(lengths[0][:2])], use_cache=False
    ).logits  # the second document: positions are relative
    assert (logits[0, lengths[0][0] : sum(lengths[0][:2])] - alone[0]).abs().max() < 1e-4
    ce = torch.nn.functional.cross_entropy(logits.reshape(-1, v), labels.reshape(-1), ignore_index=-100)
    aux = load_balancing_loss_func(r.router_logits, config.num_experts, config.num_experts_per_tok)
    gap = min(
        (q[:, config.num_experts_per_tok - 1] - q[:, config.num_experts_per_tok]).min().item()
        for q in (l.softmax(-1).sort(-1, descending=True).values for l in r.router_logits)
    )
    assert gap > 1e-5, f"routing of {file} is too close to a tie: {gap}"
    out = {
        "ids": ids.float(),
        "document": of.float(),
        "logits": logits.detach()[:, ::4].contiguous(),
        "loss": ce.detach().reshape(1),
        "targets": (labels >= 0).sum().float().reshape(1),
        "aux_hf": aux.detach().reshape(1),
    }
    (ce + 0.5 * aux).backward()
    for name, (p, index) in views(model).items():
        out[f"hf {name}"] = summary(name, p.grad[index])
    save_file(
        out, file + ".safetensors", metadata={"config": json.dumps(config.to_dict()), "versions": json.dumps(VERSIONS)}
    )


def directory(name, config, cls, write):
    if len(sys.argv) > 1 and name not in sys.argv[1:]:
        return
    torch.manual_seed(6198)
    model = cls(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1 or not p.any():  # biases of experts start at 0
                p.add_(0.2 * torch.randn_like(p))
            else:
                p.mul_(8)
    shutil.rmtree(name, ignore_errors=True)
    write(model, name)
    if name.endswith(
        "16"
    ):  # Module.to would also round the rotary frequencies, which a reader of the files does not do
        model = cls.from_pretrained(name, dtype=torch.float32).eval()
    ids = torch.arange(1, 21) * 7 % config.vocab_size
    logits = model(input_ids=ids[None], use_cache=False).logits[0].detach().float()
    for unused in ("generation_config.json",):
        if os.path.exists(f"{name}/{unused}"):
            os.remove(f"{name}/{unused}")
    save_file(
        {"ids": ids.float(), "logits": logits},
        f"{name}/expected.safetensors",
        metadata={"versions": json.dumps(VERSIONS)},
    )


def fused(model, name):
    os.makedirs(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(name)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()},
        f"{name}/model.safetensors",
        metadata={"format": "pt"},
    )


def v4config(name):
    """Rewrites config.json with the field names of transformers 4."""
    path = f"{name}/config.json"
    c = json.load(open(path))
    rope = c.pop("rope_parameters")
    c["rope_theta"], c["rope_scaling"] = rope["rope_theta"], None
    c["torch_dtype"] = c.pop("dtype")
    json.dump(c, open(path, "w"), indent=2)


def main():
    base = dict(
        vocab_size=128,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=32,
        bos_token_id=None,
        eos_token_id=2,
    )
    moe = dict(num_experts=8, num_experts_per_tok=2)
    other = dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-3)
    case("olmoe", "olmoe", **base, **moe, pad_token_id=None)
    case("olmoe-gqa", "olmoe", **base, **moe, **other, pad_token_id=1, num_key_value_heads=2, clip_qkv=1.5)
    case("olmo", "olmo", **base, pad_token_id=None)
    case(
        "olmo-gqa-tied",
        "olmo",
        **base,
        pad_token_id=1,
        num_key_value_heads=1,
        clip_qkv=0.75,
        tie_word_embeddings=True,
    )
    llama3 = dict(
        rope_type="llama3",
        rope_theta=500.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    case(
        "llama-gqa",
        "llama",
        **base,
        pad_token_id=1,
        num_key_value_heads=2,
        rms_norm_eps=1e-3,
        max_position_embeddings=256,
        rope_parameters=llama3,
    )
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
    case(
        "llama-tied",
        "llama",
        **base,
        pad_token_id=None,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        rope_parameters=yarn,
    )
    case("mistral", "mistral", **base, **other, num_key_value_heads=2, head_dim=24, sliding_window=None)
    case("qwen2", "qwen2", **base, num_key_value_heads=2, tie_word_embeddings=True)
    case("qwen3", "qwen3", **base, **other, num_key_value_heads=2, head_dim=24)
    case(
        "qwen3-moe",
        "qwen3_moe",
        **base,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        num_key_value_heads=2,
        head_dim=24,
    )
    case(
        "qwen3-moe-layers",
        "qwen3_moe",
        **base | {"num_hidden_layers": 5},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0, 3],
        num_key_value_heads=2,
        head_dim=16,
    )
    case(
        "qwen2-moe",
        "qwen2_moe",
        **base,
        num_experts=4,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[0],
        num_key_value_heads=2,
    )
    case("mixtral", "mixtral", **base, **other, num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=2)
    latent = base | dict(
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=20,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=16,
        num_key_value_heads=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        rms_norm_eps=1e-3,
    )
    deep = yarn | dict(mscale=0.7, mscale_all_dim=0.9)
    case(
        "deepseek-v2",
        "deepseek_v2",
        **latent,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
        rope_parameters=deep,
    )
    case("deepseek-v3", "deepseek_v3", **latent, q_lora_rank=16, rope_parameters=deep)
    sigmoids = base | dict(
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=16,
        num_key_value_heads=2,
        head_dim=24,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-3,
    )
    default = other["rope_parameters"]
    case("dots1", "dots1", **sigmoids, rope_parameters=default, sliding_window=24, max_window_layers=1)
    part = default | dict(partial_rotary_factor=0.5)
    case("glm4-moe", "glm4_moe", **sigmoids, rope_parameters=part, attention_bias=True, use_qk_norm=True)
    case(
        "ernie4-5-moe",
        "ernie4_5_moe",
        **base,
        **other,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=1,
        moe_intermediate_size=16,
        moe_layer_start_index=0,
        moe_layer_interval=2,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
    )
    case(
        "granitemoe",
        "granitemoe",
        **base,
        **other,
        num_local_experts=6,
        num_experts_per_tok=3,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.125,
        residual_multiplier=0.3,
        logits_scaling=4.0,
        tie_word_embeddings=True,
    )
    case(
        "gpt-oss",
        "gpt_oss",
        **base,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        head_dim=24,
        sliding_window=24,
        max_position_embeddings=128,
        rope_parameters=yarn | dict(truncate=False),
    )
    case("olmo2", "olmo2", **base, **other, pad_token_id=1, num_key_value_heads=2)
    renormalised = dict(norm_topk_prob=True, num_key_value_heads=2, pad_token_id=None)
    case("flex-olmo", "flex_olmo", **base, **moe, **other, **renormalised)
    case(
        "olmo3",
        "olmo3",
        **base | {"num_hidden_layers": 4},
        pad_token_id=1,
        num_key_value_heads=2,
        sliding_window=24,
        max_position_embeddings=128,
        rope_parameters={
            "full_attention": yarn,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    documents("olmoe-documents", OlmoeConfig(**base, **moe, pad_token_id=None), PACKED)

    small = dict(
        vocab_size=40,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=8,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    smallmoe = dict(num_experts=4, num_experts_per_tok=2)
    directory(
        "hf-single",
        OlmoeConfig(**small, **smallmoe),
        OlmoeForCausalLM,
        lambda m, d: (m.save_pretrained(d), v4config(d)),
    )
    directory(
        "hf-sharded",
        OlmoeConfig(**small, **smallmoe, num_key_value_heads=1),
        OlmoeForCausalLM,
        lambda m, d: m.save_pretrained(d, max_shard_size="12KB"),
    )
    directory("hf-fused", OlmoeConfig(**small, **smallmoe), OlmoeForCausalLM, fused)
    smallmixtral = dict(num_local_experts=4, num_key_value_heads=1)
    directory(
        "hf-mixtral",
        MixtralConfig(**small, **smallmixtral),
        MixtralForCausalLM,
        lambda m, d: m.save_pretrained(d),
    )
    directory("hf-mixtral-fused", MixtralConfig(**small, **smallmixtral), MixtralForCausalLM, fused)
    smallgranite = dict(embedding_multiplier=12.0, attention_multiplier=0.125, residual_multiplier=0.22)
    directory(
        "hf-granitemoe",
        GraniteMoeConfig(**small, **smallmixtral, **smallgranite, logits_scaling=6.0),
        GraniteMoeForCausalLM,
        lambda m, d: m.save_pretrained(d, max_shard_size="12KB"),
    )
    smallgpt = dict(num_local_experts=4, num_key_value_heads=1, head_dim=8, sliding_window=8)
    directory(
        "hf-gpt-oss",
        GptOssConfig(**small, **smallgpt),
        GptOssForCausalLM,
        lambda m, d: m.save_pretrained(d, max_shard_size="12KB"),
    )
    directory(
        "hf-olmo-bf16", OlmoConfig(**small), OlmoForCausalLM, lambda m, d: m.to(torch.bfloat16).save_pretrained(d)
    )
    directory(
        "hf-olmo-tied-fp16",
        OlmoConfig(**small, tie_word_embeddings=True),
        OlmoForCausalLM,
        lambda m, d: m.to(torch.float16).save_pretrained(d),
    )
    print(VERSIONS)


def main4():
    """Makes the directory of transformers 4 with one of its releases.

    config.json is unchanged, and experts are separate parameters in memory as well.
    """
    small = dict(
        vocab_size=40,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=8,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    directory(
        "hf-v4-bf16",
        OlmoeConfig(
            **small, num_experts=4, num_experts_per_tok=2, num_key_value_heads=1, clip_qkv=0.9, rope_theta=700.0
        ),
        OlmoeForCausalLM,
        lambda m, d: m.to(torch.bfloat16).save_pretrained(d, max_shard_size="6KB"),
    )
    print(VERSIONS)


if __name__ == "__main__":
    main4() if transformers.__version__.startswith("4.") else main()
