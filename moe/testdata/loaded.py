"""Loads the files of Model.Save with transformers, checks weights and logits, and writes
loaded.json.

Run in the package's directory:

    MULA_EXPORT=$DIR go test -run TestSavedDirectoryIsTheOneTransformersLoaded .
    cd testdata && python loaded.py $DIR
"""

import hashlib, json, os, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from golden import VERSIONS, formula, views

cases = {}
for name in sorted(os.listdir(sys.argv[1])):
    directory = os.path.join(sys.argv[1], name)
    golden = load_file(f"{name.removesuffix('-sharded').removesuffix('-bf16')}.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(info.get(k) for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    bf16 = name.endswith("-bf16")
    assert model.dtype == (torch.bfloat16 if bf16 else torch.float32), model.dtype
    weights = 0.0
    for key, (p, index) in views(model).items():
        want = formula(key, tuple(p[index].shape)).to(p.dtype)
        if key == "model.embed_tokens.weight" and model.config.pad_token_id is not None:
            want[model.config.pad_token_id] = 0
        weights = max(weights, (p[index] - want).abs().max().item())
    ids = golden["ids"].long()[:, :-1]
    reference = golden["logits"]
    if bf16:  # both sides of the comparison have rounded weights, but computed in float32
        reference, same = None, AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        with torch.no_grad():
            for key, (p, index) in views(same).items():
                p[index] = formula(key, tuple(p[index].shape)).to(torch.bfloat16).float()
        reference = same.eval()(ids).logits.detach()[:, ::4]
        model = model.float()
    logits = model.eval()(ids).logits.detach()[:, ::4]
    files = {
        f: hashlib.sha256(open(os.path.join(directory, f), "rb").read()).hexdigest()
        for f in sorted(os.listdir(directory))
    }
    cases[name] = {
        "class": type(model).__name__,
        "weights": weights,
        "logits": (logits - reference).abs().max().item(),
        "files": files,
    }
    print(name, cases[name]["class"], weights, cases[name]["logits"])
json.dump({"versions": VERSIONS, "cases": cases}, open("loaded.json", "w"), indent=1)
