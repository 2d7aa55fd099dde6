"""Adds the config.json files of the installed transformers' save_pretrained to configs.json.

It covers the supported models, with and without fields that have default values. Run it once with
each version:

    python configs.py
"""

import json, os
from transformers import AutoConfig, __version__

path = os.path.join(os.path.dirname(__file__), "configs.json")
configs = json.load(open(path)) if os.path.exists(path) else {}
REQUIRED = {
    "olmo3": {"rope_theta": 500000.0},  # the defaults of transformers 4 and 5 differ
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},  # the default of hidden_size is not a multiple of num_attention_heads
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
}
FAMILIES = "olmoe", "olmo", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "olmo2", "olmo3", "flex_olmo"
FAMILIES += "deepseek_v2", "deepseek_v3", "qwen2_moe", "dots1", "glm4_moe", "ernie4_5_moe", "granitemoe", "gpt_oss"
for family in FAMILIES:
    clips = family in ("olmoe", "olmo")
    padded = clips or family in ("olmo2", "olmo3", "flex_olmo", "ernie4_5_moe")  # has a pad_token_id by default
    for kind, fields in (
        ("defaults", {}),
        (
            "others",
            {
                "architectures": [
                    type(AutoConfig.for_model(family)).__name__.replace("Config", "ForCausalLM"),
                ],
                "dtype": "bfloat16",
                "num_key_value_heads": 2,
                "tie_word_embeddings": family != "ernie4_5_moe",  # not the default
                "bos_token_id": 0,
                "pad_token_id": None if padded else 3,
                "use_cache": False,
                "attn_implementation": "sdpa",
            }
            | ({"clip_qkv": 8.0} if clips else {})
            | ({"mlp_bias": False} if family == "llama" else {})
            | ({"num_attention_heads": 2} if family.startswith("deepseek") else {}),
        ),
    ):
        for use_diff in True, False:
            config = AutoConfig.for_model(family, **fields, **REQUIRED.get(family, {}))
            name = f"{__version__} {family} {kind}{'' if use_diff else ', every field'}"
            configs[name] = json.loads(config.to_json_string(use_diff=use_diff))
with open(path, "w") as f:
    json.dump(configs, f, indent=1, sort_keys=True)
    f.write("\n")
