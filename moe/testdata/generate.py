"""Makes generate.json with Hugging Face transformers.

It has the results of generate for the hf-* directories here, and the tokens that remain after
temperature, top-k and top-p. Run in this directory; needs torch, transformers, safetensors.
"""

import json
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from golden import VERSIONS

PROMPT = [3, 1, 4, 1, 5, 9, 26]

greedy = {}
for name in ("hf-single", "hf-sharded", "hf-fused", "hf-olmo-bf16"):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # do not stop early
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=50,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(PROMPT) :].tolist()
    assert len(tokens) == 50
    two = torch.stack(out.logits)[:, 0].topk(2).values
    gap = (two[:, 0] - two[:, 1]).min().item()
    assert gap > 1e-4, f"{name}: two tokens are nearly as likely: {gap}"
    greedy[name] = tokens

torch.manual_seed(6198)
logits = (3 * torch.randn(60)).tolist()
filters = []
for temperature in (0.3, 0.8, 1.0, 2.5):
    for k in (0, 1, 2, 7, 50, 60, 1000):
        for p in (0.0, 0.001, 0.35, 0.9, 0.999, 1.0):
            steps = LogitsProcessorList()  # composed as in GenerationMixin
            if temperature != 1:
                steps.append(TemperatureLogitsWarper(temperature))
            if k > 0:
                steps.append(TopKLogitsWarper(top_k=k))
            if 0 < p < 1:
                steps.append(TopPLogitsWarper(top_p=p))
            scores = steps(torch.tensor([PROMPT]), torch.tensor([logits]))[0]
            probabilities = scores.softmax(-1)
            kept = [i for i in scores.argsort(descending=True).tolist() if scores[i] > -float("inf")]
            filters.append(
                {
                    "temperature": temperature,
                    "top_k": k,
                    "top_p": p,
                    "kept": kept,
                    "probabilities": [round(probabilities[i].item(), 7) for i in kept[:5]],
                }
            )

json.dump(
    {"versions": VERSIONS, "prompt": PROMPT, "greedy": greedy, "logits": logits, "filters": filters},
    open("generate.json", "w"),
    separators=(",", ":"),
)
