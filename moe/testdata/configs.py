"""Adds the config.json files of the installed transformers' save_pretrained to configs.json.

It covers the supported models, with and without fields that have default values. Run it once with
each version:

    python configs.py
"""

import json, os
from transformers import LlamaConfig, OlmoConfig, OlmoeConfig, __version__

path = os.path.join(os.path.dirname(__file__), "configs.json")
configs = json.load(open(path)) if os.path.exists(path) else {}
for config in OlmoeConfig, OlmoConfig, LlamaConfig:
    for kind, fields in (
        ("defaults", {}),
        (
            "others",
            {
                "architectures": [config.__name__.replace("Config", "ForCausalLM")],
                "dtype": "bfloat16",
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
                "bos_token_id": 0,
                "pad_token_id": 3 if config is LlamaConfig else None,
                "use_cache": False,
                "attn_implementation": "sdpa",
            }
            | ({"mlp_bias": False} if config is LlamaConfig else {"clip_qkv": 8.0}),
        ),
    ):
        for use_diff in True, False:
            name = f"{__version__} {config.model_type} {kind}{'' if use_diff else ', every field'}"
            configs[name] = json.loads(config(**fields).to_json_string(use_diff=use_diff))
with open(path, "w") as f:
    json.dump(configs, f, indent=1, sort_keys=True)
    f.write("\n")
