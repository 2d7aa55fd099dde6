#!/usr/bin/env python3
"""Trains with mula and with PyTorch + transformers, and compares the losses of every step.

Both start from the same weights and use the same batches.

    conformance/environments.sh DIR transformers-5.23.0 && make build
    DIR/transformers-5.23.0/bin/python conformance/training.py [--write]      about a minute
    … conformance/training.py --preset mula-tiny --batch 8 --length 128      some minutes
    … conformance/training.py --precision bf16_mixed [--write]
    … conformance/training.py --precision bf16_compact
    … conformance/training.py --set families [--write]                       parts of other families
    … conformance/training.py --set balance [--write]                   aux_loss: {form: global}
    … conformance/training.py --set predictions [--write]               multi-token prediction
    … conformance/training.py --set noise [--write]                     noise of routers

The text is made by formula. mula makes the tokenizer, the shard, the plan, the batches (mula
stream) and the initial weights (the checkpoint of a run whose only step has a learning rate of
1e-30). The reference is transformers' own model with torch's AdamW, clip_grad_norm_ and LambdaLR,
in fp32. transformers computes the load-balancing loss of form hf. This script computes the z-loss
and the load-balancing loss of MegaBlocks, which transformers does not have, from its router logits.
With the form global, the reference computes the loss of MegaBlocks over all tokens of the step,
which is one batch, and mula has micro-batches of one sample. Releases of transformers 5 until
spring 2026 return probabilities as router logits, so that their load-balancing loss uses a softmax
of a softmax. The script refuses these releases.

Prints the losses side by side and the largest relative differences, and exits with 1 if a loss
differs by more than 1e-3. The reference runs a second time with other kernels (attention sdpa,
experts grouped_mm) and initial weights that differ by a rounding error: the difference of the two
reference runs shows the effect of rounding. When a token changes its experts, or an element exceeds
clip_qkv, a gradient jumps. With a learning rate of 2e-3, or with clip_qkv and any learning rate,
two runs of mula-nano then differ by 1e-3 after 200 steps. The runs here avoid these settings.

transformers does not compute layers of multi-token prediction. With --set predictions, this script
computes them from the formula in docs/reference/models.md, with transformers' own decoder layers
and norms.

With --set noise, transformers multiplies by the random numbers that docs/reference/models.md
describes, which this script computes with numpy, instead of torch's.

With --precision bf16_mixed and bf16_compact, the reference is the model in bfloat16, with bfloat16
activations and gradients. Its optimizer has float32 masters and adds the gradients of micro-batches
in float32. It rounds more than mula.

--write writes the reference's numbers to golden/training.json, golden/mixed.json,
golden/families.json, golden/balance.json, golden/predictions.json or golden/noise.json. go test
./conformance compares mula's numbers with them.
"""

import argparse, hashlib, json, math, pathlib, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-3
STEPS = 200


def runs(preset, batch):
    """Returns the train.yaml of each run, which the reference also reads.

    It has no plan, output, tokenizer, threads and checkpoints.
    """
    common = {
        "batch_size": batch,
        "micro_batch_size": batch,
        "steps": STEPS,
        "optimizer": {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0},
        "schedule": {
            "name": "cosine",
            "learning_rate": 0.0006,
            "min_learning_rate": 0.0001,
            "warmup_steps": 20,
            "warmup_from": "zero",
            "decay_steps": STEPS,
        },
    }
    return {
        "OLMoE, load balancing of transformers": {
            **common,
            "seed": 1,
            "model": {"preset": preset},
            "aux_loss": {"form": "hf", "coefficient": 0.01},
            "z_loss": {"coefficient": 0.0},
        },
        "OLMoE, load balancing of MegaBlocks, z-loss, two micro-batches, grouped queries, tied embeddings": {
            **common,
            "seed": 2,
            "micro_batch_size": batch // 2,
            "model": {
                "preset": preset,
                "num_key_value_heads": 2,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "initializer_cutoff": 3.0,
                "tie_word_embeddings": True,
            },
            "optimizer": {"name": "adamw", "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.05, "clip": 0.5},
            "schedule": {
                "name": "cosine",
                "learning_rate": 0.0006,
                "min_learning_rate": 0.0001,
                "warmup_steps": 10,
                "warmup_from": "min",
                "decay_steps": 180,
            },
            "aux_loss": {"form": "megablocks", "coefficient": 0.01},
            "z_loss": {"coefficient": 0.001},
        },
        "OLMo, dense": {
            **common,
            "seed": 3,
            "model": {
                "preset": preset,
                "model_type": "olmo",
                "num_experts": 0,
                "num_experts_per_tok": 0,
                "router_aux_loss_coef": 0.0,
            },
            "aux_loss": {"form": "none", "coefficient": 0.0},
            "z_loss": {"coefficient": 0.0},
        },
        "OLMo 3, dense, sliding attention, norms after blocks": {
            **common,
            "seed": 3,
            "model": {
                "preset": preset,
                "model_type": "olmo3",
                "num_experts": 0,
                "num_experts_per_tok": 0,
                "router_aux_loss_coef": 0.0,
                "num_hidden_layers": 4,
                "sliding_window": 16,
                "rope_theta": 500000.0,
            },
            "aux_loss": {"form": "none", "coefficient": 0.0},
            "z_loss": {"coefficient": 0.0},
        },
    }


def families(preset, batch):
    """Returns the train.yaml of more runs, for parts that only some families have.

    torch does not update correction biases, and neither do these runs.
    """
    common = runs(preset, batch)["OLMo, dense"]
    still = {"router_bias": {"update_speed": 0}}
    layers = {"dense_layers": "0", "dense_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    return {
        "GLM-4.5: heads rotated in part, biases and norms of queries and keys, sigmoid router": {
            **common,
            **still,
            "model": {
                "preset": preset,
                "model_type": "glm4_moe",
                "partial_rotary_factor": 0.5,
                "attention_bias": True,
                "use_qk_norm": True,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "router_aux_loss_coef": 0.0,
                **layers,
            },
        },
        "ERNIE 4.5: rotation of adjacent elements, softmax router that divides by the sum of choices": {
            **common,
            **still,
            "model": {"preset": preset, "model_type": "ernie4_5_moe", "norm_topk_prob": True, **layers},
        },
        "DeepSeek-V3: latent attention, groups of experts, shared experts": {
            **common,
            **still,
            "model": {
                "preset": preset,
                "model_type": "deepseek_v3",
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "rope_interleave": True,
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "router_aux_loss_coef": 0.0,
                **layers,
            },
        },
        "Qwen 2 MoE: shared expert with a gate, biases, load balancing of transformers": {
            **common,
            "model": {"preset": preset, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40},
            "aux_loss": {"form": "hf", "coefficient": 0.01},
        },
        "Granite: multipliers, load balancing of transformers": {
            **common,
            "model": {
                "preset": preset,
                "model_type": "granitemoe",
                "norm_topk_prob": True,
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.0625,
                "residual_multiplier": 0.22,
                "logits_scaling": 0.5,
                "tie_word_embeddings": True,
            },
            "aux_loss": {"form": "hf", "coefficient": 0.01},
        },
        "gpt-oss: attention sinks, biases, clamped SwiGLU, sliding attention, YaRN": {
            **common,
            "model": {
                "preset": preset,
                "model_type": "gpt_oss",
                "num_key_value_heads": 2,
                "head_dim": 24,
                "norm_topk_prob": True,
                "sliding_window": 16,
                "max_position_embeddings": 128,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "no_truncate": True,
                },
            },
            "aux_loss": {"form": "hf", "coefficient": 0.01},
        },
    }


def balance(preset, batch):
    """Returns the train.yaml of runs with the load-balancing loss over the global batch."""
    common = {
        **runs(preset, batch)["OLMo, dense"],
        "micro_batch_size": 1,
        "aux_loss": {"form": "global", "coefficient": 0.05},
    }
    return {
        "OLMoE, load balancing over the global batch, z-loss": {
            **common,
            "model": {"preset": preset},
            "z_loss": {"coefficient": 0.001},
        },
        "Qwen 3 MoE, load balancing over the global batch, a layer without experts": {
            **common,
            "model": {
                "preset": preset,
                "model_type": "qwen3_moe",
                "head_dim": 24,
                "norm_topk_prob": True,
                "dense_layers": "0",
                "dense_intermediate_size": 64,
            },
        },
    }


def predictions(preset, batch):
    """Returns the train.yaml of runs with layers of multi-token prediction."""
    of = families(preset, batch)
    deepseek = next(config for name, config in of.items() if name.startswith("DeepSeek-V3"))
    glm = next(config for name, config in of.items() if name.startswith("GLM-4.5"))
    return {
        "DeepSeek-V3, two layers of multi-token prediction, two micro-batches": {
            **deepseek,
            "micro_batch_size": batch // 2,
            "model": {**deepseek["model"], "num_nextn_predict_layers": 2},
            "prediction_loss": {"coefficient": 0.5},
        },
        "GLM-4.5, one layer of multi-token prediction": {
            **glm,
            "model": {**glm["model"], "num_nextn_predict_layers": 1},
            "prediction_loss": {"coefficient": 0.3},
        },
    }


def noise(preset, batch):
    """Returns the train.yaml of a run with noise of routers."""
    return {
        "Mixtral, noise of routers, two micro-batches": {
            **runs(preset, batch)["OLMo, dense"],
            "seed": 5,
            "micro_batch_size": batch // 2,
            "model": {
                "preset": preset,
                "model_type": "mixtral",
                "norm_topk_prob": True,
                "num_key_value_heads": 2,
                "router_jitter_noise": 0.1,
            },
        },
    }


class Noise:
    """The random factors of the inputs of routers, instead of the factors of torch.Tensor.uniform_.

    A forward pass calls uniform_ once in each layer, in order.
    """

    def __init__(self, seed, epsilon):
        self.seed, self.epsilon, self.layer, self.first = seed, epsilon, 0, 0

    def start(self, step, first):
        """Starts a forward pass whose first token has the number first in its step."""
        self.layer, self.first, self.state = 0, first, step_seed((self.seed + 0x6A09E667F3BCC908) % 2**64, step)

    def uniform_(self, x, low, high):
        import numpy, torch

        rows, width = x.shape[0] * x.shape[1], x.shape[2]
        state = mix64(mix64((self.state + self.layer) % 2**64))
        with numpy.errstate(over="ignore"):
            number = (numpy.arange(rows, dtype="uint64") + numpy.uint64(self.first)) << numpy.uint64(32)
            z = number[:, None] + numpy.arange(width, dtype="uint64") + numpy.uint64(1)
            z = z * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(state)
            z = (z ^ z >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
            z = z ^ z >> numpy.uint64(31)
        u = (z >> numpy.uint64(40)).astype("float64") / 2**23 - 1
        self.layer += 1
        assert abs(high - 1 - self.epsilon) < 1e-9 and abs(1 - low - self.epsilon) < 1e-9
        return torch.from_numpy(1 + self.epsilon * u).to(x.dtype).view(x.shape)


def mix64(z):
    """The finaliser of SplitMix64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def step_seed(seed, step):
    """The first output of PCG-DXSM in the form of Go's math/rand/v2, of the state (seed, step)."""
    state = ((seed << 64 | step) * 0x2360ED051FC65DA44385DF649FCCF645 + 0x5851F42D4C957F2D14057B7EF767814F) % 2**128
    high, low = state >> 64, state % 2**64
    high = (high ^ high >> 32) * 0xDA942042E4DD58B5 % 2**64
    return (high ^ high >> 48) * (low | 1) % 2**64


class Predictions:
    """The layers of multi-token prediction of a model.

    The formula is in docs/reference/models.md.
    """

    def __init__(self, model, checkpoint, layers):
        import torch
        from safetensors.torch import load_file

        stored = {}
        for file in sorted(pathlib.Path(checkpoint).glob("model*.safetensors")):
            stored.update(load_file(file))
        decoder, norm = type(model.model.layers[-1]), type(model.model.norm)
        self.model, self.layers, c = model, torch.nn.ModuleList(), model.config
        for k in range(layers):
            number = c.num_hidden_layers + k
            part = torch.nn.ModuleDict(
                {
                    "layer": decoder(c, c.num_hidden_layers - 1),  # with experts, like the last layer
                    "enorm": norm(c.hidden_size, c.rms_norm_eps),
                    "hnorm": norm(c.hidden_size, c.rms_norm_eps),
                    "eh_proj": torch.nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False),
                    "norm": norm(c.hidden_size, c.rms_norm_eps),
                }
            )
            prefix = f"model.layers.{number}."
            own = {name[len(prefix) :]: t for name, t in stored.items() if name.startswith(prefix)}
            into = {name: own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
            into["norm"] = own.pop("shared_head.norm.weight")
            experts = [
                {p: own.pop(f"mlp.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")}
                for e in range(c.num_local_experts if hasattr(c, "num_local_experts") else c.n_routed_experts)
            ]
            own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in experts])
            own["mlp.experts.down_proj"] = torch.stack([e["down"] for e in experts])
            part["layer"].load_state_dict(own)
            for name, weight in into.items():
                part[name].load_state_dict({"weight": weight})
            self.layers.append(part)
        self.layers.train()

    def losses(self, tokens, hidden):
        """Returns the sums of the cross entropies of each layer, and their numbers of tokens.

        tokens has the rows with their last targets, and hidden the input of the model's head.
        """
        import torch

        model, length = self.model, hidden.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        rotations = model.model.rotary_emb(hidden, positions)
        out = []
        for k, part in enumerate(self.layers):
            read = tokens[:, (torch.arange(length) + k + 1).clamp(max=length)]
            pair = torch.cat([part["enorm"](model.model.embed_tokens(read)), part["hnorm"](hidden)], -1)
            x = part["layer"](
                part["eh_proj"](pair), attention_mask=mask, position_ids=positions, position_embeddings=rotations
            )
            hidden = part["norm"](x[0] if isinstance(x, tuple) else x)
            logits, targets = model.lm_head(hidden[:, : length - k - 1]), tokens[:, k + 2 :]
            out.append(
                (
                    torch.nn.functional.cross_entropy(
                        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum"
                    ),
                    targets.numel(),
                )
            )
        return out


def corpus(documents):
    """Returns documents of artificial words, as text in training_test.go.

    Each word depends on the previous word, with some choice, or is a frequent word.
    """
    state, word = 1, 0

    def draw(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    def syllable(i):
        return "bdfgklmnprstvz"[i % 14] + "aeiou"[i // 14 % 5]

    for number in range(documents):
        text = []
        for _ in range(20):
            words = []
            for _ in range(6 + draw(8)):
                word = (31 * word + 17 + draw(3)) % 400 if draw(4) else draw(1024) ** 3 * 400 >> 30
                words.append(syllable(word) + (syllable(word // 70 + 37 * word) if word % 3 else ""))
            text.append(" ".join(words) + ".")
        yield json.dumps({"id": str(number), "text": " ".join(text)}, separators=(",", ":")) + "\n"


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr.decode()}")
    return done.stdout


def prepare(mula, work, batch, length):
    """Makes the corpus, tokenizer, shard and plan, and returns the batches as lists of tensors."""
    import pyarrow, torch

    text = "".join(corpus(300))
    (work / "corpus.jsonl").write_text(text)
    run(mula, "tokenizer", "train", "--vocab-size", 512, "--output", work / "tokenizer.json", work / "corpus.jsonl")
    run(mula, "tokenize", "--tokenizer", work / "tokenizer.json", "--output", work / "words", work / "corpus.jsonl")
    (work / "blend.yaml").write_text(
        f"sequence_length: {length}\nseed: 7\nsources: [{{name: words, shards: [words.idx]}}]\nsamples: "
        f"{STEPS * batch}\n"
    )
    run(mula, "blend", "--config", work / "blend.yaml", "--output", work / "plan.json")
    stream = run(mula, "stream", "--plan", work / "plan.json", "--batch-size", batch)
    batches = [
        torch.tensor(b.column("tokens").flatten().to_numpy().reshape(b.num_rows, -1).astype("int64"))
        for b in pyarrow.ipc.open_stream(stream)
    ]
    assert len(batches) == STEPS and all(b.shape == (batch, length + 1) for b in batches)
    return text, batches


def train(mula, work, name, config):
    """Runs mula and returns its directory, the fingerprint of its plan and the lines of its steps.
    """
    own = {"plan": "plan.json", "tokenizer": "tokenizer.json", "output": name, "threads": 2, "checkpoint": {"every": 0}}
    (work / f"{name}.yaml").write_text(json.dumps({**config, **own}))
    run(mula, "train", "--config", work / f"{name}.yaml")
    with open(work / name / "metrics.jsonl") as f:
        lines = [json.loads(line) for line in f]
    return work / name, lines[0]["run"]["plan"], [line for line in lines if "loss" in line]


def learning_rate(schedule, step):
    """The schedule in docs/formats/config.md: warm-up, then half a cosine. Steps count from 0."""
    peak, low, warm, decay = (
        schedule[k] for k in ("learning_rate", "min_learning_rate", "warmup_steps", "decay_steps")
    )
    start, t = (low if schedule["warmup_from"] == "min" else 0), step + 1
    if t <= warm:
        return start + (peak - start) * t / warm
    return low + (peak - low) * (1 + math.cos(math.pi * min(1, (t - warm) / (decay - warm)))) / 2


def megablocks(router_logits, experts, chosen):
    """MegaBlocks' batched_load_balancing_loss, E/(L·T·K) · Σ_l Σ_e c_le · mean_t p_le, and router
    z-loss, Σ lse²/(L·T·K).
    """
    import torch

    layers, tokens = len(router_logits), router_logits[0].shape[0]
    balance = z = 0
    for logits in router_logits:
        p = torch.softmax(logits, -1)
        counts = torch.bincount(torch.topk(p, chosen).indices.reshape(-1), minlength=experts)
        balance = balance + (counts * p.mean(0)).sum()
        z = z + torch.logsumexp(logits, -1).square().sum()
    return balance * experts / (layers * tokens * chosen), z / (layers * tokens * chosen)


def reference(checkpoint, config, batches, attention="eager", experts="eager", rounding=0.0):
    """Runs the same steps in torch, from mula's checkpoint.

    Returns loss, auxiliary losses, gradient norm and learning rate of each. Weights are first
    changed by up to the fraction rounding. With a precision other than fp32, the weights
    are bfloat16, and the optimizer updates float32 masters.
    """
    import torch, transformers

    opt, schedule, form = config["optimizer"], config["schedule"], config["aux_loss"]["form"]
    sparse, mixture = form != "none", config["model"].get("num_experts") != 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.float32 if config["precision"] == "fp32" else torch.bfloat16,
        attn_implementation=attention,
        **({"experts_implementation": experts} if mixture else {}),
    )
    model.train()
    ahead = Predictions(model, checkpoint, config["model"].get("num_nextn_predict_layers", 0))
    weights = [*model.parameters(), *ahead.layers.parameters()]
    if rounding:
        with torch.no_grad():
            random = torch.Generator().manual_seed(1)
            for p in weights:
                p.mul_(1 + rounding * (2 * torch.rand(p.shape, generator=random) - 1))
    masters = weights if config["precision"] == "fp32" else [p.detach().float() for p in weights]
    optimizer = torch.optim.AdamW(
        masters, lr=1, betas=opt["betas"], eps=opt["eps"], weight_decay=opt["weight_decay"]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(schedule, step))
    rows = len(batches[0]) if form == "global" else config["micro_batch_size"]
    out = []
    noise = Noise(config["seed"], config["model"].get("router_jitter_noise", 0))
    uniform = torch.Tensor.uniform_
    if noise.epsilon:
        torch.Tensor.uniform_ = lambda x, low, high: noise.uniform_(x, low, high)
    for step, batch in enumerate(batches):
        sums, parts = dict(loss=0.0, aux_loss=0.0, z_loss=0.0), batch.split(rows)
        predicted = [0.0] * len(ahead.layers)
        for number, part in enumerate(parts):
            noise.start(step, number * rows * (part.shape[1] - 1))
            targets = part[:, 1:].contiguous()
            answer = model(
                input_ids=part[:, :-1],
                use_cache=False,
                **({"output_router_logits": True} if sparse else {}),
                **({"output_hidden_states": True} if predicted else {}),
            )
            logits = answer.logits.float()
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
            balance = z = torch.zeros(())
            if sparse:
                router_logits = [logits.float() for logits in answer.router_logits]
                if all(torch.allclose(logits.sum(-1), torch.ones(())) for logits in router_logits):
                    sys.exit(
                        f"transformers {transformers.__version__} returns probabilities as router logits; take a "
                        "release without this error"
                    )
                balance, z = megablocks(router_logits, router_logits[0].shape[-1], model.config.num_experts_per_tok)
                if form == "hf":
                    balance = answer.aux_loss
            total = loss + config["aux_loss"]["coefficient"] * balance + config["z_loss"]["coefficient"] * z
            if predicted:
                normed = answer.hidden_states[-1]  # after the final norm
                assert torch.equal(model.lm_head(normed), answer.logits)
                scale = config["prediction_loss"]["coefficient"] / len(predicted) / targets.numel()
                for k, (ce, n) in enumerate(ahead.losses(part, normed)):
                    total = total + scale * ce
                    predicted[k] += ce.item() / n / len(parts)
            (total / len(parts)).backward()
            if masters is not weights:
                for p, master in zip(weights, masters):
                    if p.grad is not None:
                        master.grad = p.grad.float() + (0 if master.grad is None else master.grad)
                        p.grad = None
            for key, value in (("loss", loss), ("aux_loss", balance), ("z_loss", z)):
                sums[key] += value.item() / len(parts)
        if predicted:
            sums["prediction_loss"] = predicted
        sums["grad_norm"] = torch.nn.utils.clip_grad_norm_(masters, opt["clip"]).item()
        sums["learning_rate"] = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if masters is not weights:
            with torch.no_grad():
                for p, master in zip(weights, masters):
                    p.copy_(master)
        out.append(sums)
    torch.Tensor.uniform_ = uniform
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--preset", default="mula-nano")
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--length", type=int, default=64)
    ap.add_argument("--precision", choices=["fp32", "bf16_mixed", "bf16_compact"], default="fp32")
    ap.add_argument(
        "--set",
        choices=["runs", "families", "balance", "predictions", "noise"],
        default="runs",
        help="the runs to compare",
    )
    ap.add_argument("--write", action="store_true", help="write the golden file of the precision")
    args = ap.parse_args()
    if args.write and [args.preset, args.batch, args.length] != ["mula-nano", 4, 64]:
        ap.error("the golden file has the default sizes")
    if args.set != "runs" and args.precision != "fp32":
        ap.error("the runs of this set have fp32")
    if args.write and args.precision == "bf16_compact":
        ap.error("bf16_compact has no golden file of its own; write the file of bf16_mixed")
    import numpy, torch, transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }
    print(
        f"{args.preset}, {STEPS} steps of {args.batch} x {args.length} tokens, {args.precision}; "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )
    wrong, golden = False, []
    with tempfile.TemporaryDirectory() as tmp:
        work = pathlib.Path(tmp)
        text, batches = prepare(args.mula, work, args.batch, args.length)
        sets = {"runs": runs, "families": families, "balance": balance, "predictions": predictions, "noise": noise}
        configs = sets[args.set]
        for i, (name, config) in enumerate(configs(args.preset, args.batch).items()):
            config["precision"] = args.precision
            began = time.perf_counter()
            # A step with such a learning rate does not change the initial weights.
            start, plan, _ = train(
                args.mula,
                work,
                f"start{i}",
                {
                    **config,
                    "steps": 1,
                    "schedule": {**config["schedule"], "learning_rate": 1e-30, "min_learning_rate": 1e-30},
                },
            )
            _, _, mine = train(args.mula, work, f"run{i}", config)
            took = time.perf_counter() - began
            checkpoint = work / f"initial{i}"  # with the names of tensors that transformers has
            run(args.mula, "export", "--model", start, "--output", checkpoint, "--dtype", args.precision[:4])
            theirs = reference(checkpoint, config, batches)
            sinks = config["model"].get("model_type") == "gpt_oss"  # transformers has no sdpa with sinks
            again = reference(
                checkpoint, config, batches, "eager" if sinks else "sdpa", "grouped_mm", rounding=2**-23
            )
            assert len(mine) == len(theirs) == STEPS
            print(
                f"\n{name} (mula {took:.0f} s, torch twice {time.perf_counter() - began - took:.0f} s)\n{'step':>6} "
                f"{'mula':>10} {'torch':>10} {'difference':>12}"
            )
            for step in [0, 1, 2, 5, 10, 20, 50, 100, 150, STEPS - 1]:
                a, b = mine[step]["loss"], theirs[step]["loss"]
                print(f"{step:6} {a:10.6f} {b:10.6f} {a / b - 1:12.1e}")
            print(f"largest relative differences {'mula':>12} {'step':>5} {'mean':>8}   torch again")
            for field in ["loss", "aux_loss", "z_loss", "grad_norm", "learning_rate"]:
                if not theirs[0][field] and field != "learning_rate":
                    continue
                mula, torch_ = ([abs(a[field] / b[field] - 1) for a, b in zip(side, theirs)] for side in (mine, again))
                print(
                    f"  {field:26} {max(mula):12.1e} {mula.index(max(mula)):5} {sum(mula) / STEPS:8.1e} "
                    f"{max(torch_):10.1e} {torch_.index(max(torch_)):5}"
                )
                wrong |= field == "loss" and not max(mula) <= TOLERANCE
            for k in range(len(theirs[0].get("prediction_loss", []))):
                apart = [abs(a["prediction_loss"][k] / b["prediction_loss"][k] - 1) for a, b in zip(mine, theirs)]
                print(f"  prediction_loss, layer {k}     {max(apart):12.1e} {apart.index(max(apart)):5}")
                wrong |= not max(apart) <= TOLERANCE
            golden.append(
                {
                    "name": name,
                    "train": config,
                    **{
                        k: [float(f"{step[k]:.7g}") for step in theirs]
                        for k in ("loss", "aux_loss", "z_loss")
                        if theirs[0][k]
                    },
                    **(
                        {"prediction_loss": [[float(f"{x:.7g}") for x in step["prediction_loss"]] for step in theirs]}
                        if "prediction_loss" in theirs[0]
                        else {}
                    ),
                }
            )
    if args.write:
        lines = ",\n".join(
            "{" + ",\n ".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in g.items()) + "}"
            for g in golden
        )
        header = {
            "script": "conformance/training.py",
            "versions": versions,
            "corpus": hashlib.sha256(text.encode()).hexdigest(),
            "plan": plan,
        }
        name = "training.json" if args.precision == "fp32" else "mixed.json"
        if args.set != "runs":
            name = f"{args.set}.json"
        (here / "golden" / name).write_text(
            json.dumps(header, separators=(",", ":"))[:-1] + f',"runs":[\n{lines}\n]}}\n'
        )
    if wrong:
        sys.exit(f"WRONG: a loss differs by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
