"""Makes golden files of experts in MXFP4 with Hugging Face transformers.

Run in this directory; needs torch, transformers, safetensors.

mxfp4.safetensors
    A matrix of 255 rows of 32 values: the 16 codes twice, with another scale in each row, from 0 to
    254. `values` are the bfloat16 numbers of transformers, transposed.
hf-gpt-oss-mxfp4/
    A small gpt-oss in the form of the released files: bfloat16, with experts in MXFP4 that a
    quantizer below makes from random matrices. expected.safetensors has the weights of its experts
    and the logits after from_pretrained, which converts experts to bfloat16. The logits are
    computed in float32.
"""

import json, os, shutil
import torch, transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors
from golden import VERSIONS

DIRECTORY = "hf-gpt-oss-mxfp4"
# as in the released files
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def quantize(matrix):
    """Returns the blocks and scales of matrices [..., out, in].

    The scale of 32 values is the power of two that maps the largest value into [4, 8), as in the
    OCP Microscaling Formats specification 1.0, section 6.3. Each value gets the code of the nearest
    number.
    """
    groups = matrix.reshape(*matrix.shape[:-1], -1, 32)
    exponent = groups.abs().amax(-1).log2().floor() - 2
    table = torch.tensor(FP4_VALUES)
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def all_codes():
    row = torch.tensor([2 * i + 1 << 4 | 2 * i for i in range(8)] * 2, dtype=torch.uint8)
    blocks, scales = row.repeat(1, 255, 1, 1), torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1)
    values = convert_moe_packed_tensors(blocks, scales)
    assert values.shape == (1, 32, 255) and values.dtype == torch.bfloat16
    tensors = {"blocks": blocks, "scales": scales, "values": values}
    save_file(tensors, "mxfp4.safetensors", metadata={"versions": json.dumps(VERSIONS)})


def directory():
    config = GptOssConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        pad_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    torch.manual_seed(1)
    start = GptOssForCausalLM(config)
    with torch.no_grad():
        for p in start.parameters():
            if p.dim() == 1 or not p.any():  # biases of experts start at 0
                p.add_(0.2 * torch.randn_like(p))
    weights = start.to(torch.bfloat16).state_dict()
    files, want = {}, {}
    for name, w in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = w
            continue
        blocks, scales = quantize(w.float().transpose(1, 2))
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        want[name] = convert_moe_packed_tensors(blocks, scales)
        assert want[name].shape == w.shape and (want[name] - w).abs().max() < 0.2
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    os.mkdir(DIRECTORY)
    save_file({k: v.contiguous() for k, v in files.items()}, f"{DIRECTORY}/model.safetensors")
    fields = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": {"modules_to_not_convert": KEPT, "quant_method": "mxfp4"},
    }
    with open(f"{DIRECTORY}/config.json", "w") as f:
        json.dump(fields, f, indent=2)
    model, info = AutoModelForCausalLM.from_pretrained(
        DIRECTORY,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True, modules_to_not_convert=KEPT),
        output_loading_info=True,
    )
    assert not any(info.get(k) for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    loaded = model.state_dict()
    for name, w in want.items():
        assert torch.equal(loaded[name], w), name
    ids = torch.arange(1, 21) * 7 % config.vocab_size
    with torch.no_grad():
        logits = model.float().eval()(input_ids=ids[None], use_cache=False).logits[0]
    save_file(
        want | {"ids": ids.float(), "logits": logits},
        f"{DIRECTORY}/expected.safetensors",
        metadata={"versions": json.dumps(VERSIONS)},
    )


if __name__ == "__main__":
    all_codes()
    directory()
    print(VERSIONS)
