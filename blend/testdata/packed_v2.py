"""The order of amended packed plans, written from docs/formats/packing.md and plan.md, not from the
Go code.

This writes every position of an amended packed plan:

    python3 packed_v2.py packed_amended.json > packed_amended_order.json
"""

import hashlib
import json
import sys

from plan_v2 import AmendedPlan


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        file = json.load(f)
    plan = file["plan"]
    assert plan["order"] == "packed 2"
    canonical = json.dumps(plan, ensure_ascii=False, separators=(",", ":")).encode()
    assert hashlib.sha256(canonical).hexdigest() == file["fingerprint"]
    # A plan of windows has the same order if each part is one shard with as many windows as the
    # part has samples.
    length = plan["sequence_length"]
    sources = []
    for s in plan["sources"]:
        packings = [s["packing"]] + [g["packing"] for g in s["growth"]]
        sources.append(
            {
                "name": s["name"],
                "validation_windows": sum(p["validation_samples"] for p in packings),
                "growth": [
                    {
                        "sample": g["sample"],
                        "shards": 1,
                        "validation_windows": g["packing"]["validation_samples"],
                    }
                    for g in s["growth"]
                ],
                "shards": [{"tokens": p["samples"] * length + 1} for p in packings],
            }
        )
    order = AmendedPlan({**plan, "sources": sources})
    for check in plan["checks"]:
        source, _, window = order.at(check["position"])
        assert (source, window) == (check["source"], check["window"])
    rows = [[p, *order.at(p)] for p in range(order.length)]
    json.dump(
        {"python": sys.version.split()[0], "columns": "position, source, epoch, window", "rows": rows},
        sys.stdout,
        separators=(",", ":"),
    )
    print()


if __name__ == "__main__":
    main()
