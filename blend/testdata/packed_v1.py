"""The order of packed plans, written from docs/formats/packing.md and plan.md, not from the Go
code.

This writes every position of a packed plan:

    python3 packed_v1.py packed.json > packed_order.json
"""

import hashlib
import json
import sys

from plan_v1 import Plan


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        file = json.load(f)
    plan = file["plan"]
    assert plan["order"] == "packed 1"
    canonical = json.dumps(plan, ensure_ascii=False, separators=(",", ":")).encode()
    assert hashlib.sha256(canonical).hexdigest() == file["fingerprint"]
    # A plan of windows has the same order if it has as many windows as this plan has samples.
    length = plan["sequence_length"]
    windows = [
        {
            "name": s["name"],
            "validation_windows": s["packing"]["validation_samples"],
            "shards": [{"tokens": s["packing"]["samples"] * length + 1}],
        }
        for s in plan["sources"]
    ]
    order = Plan({**plan, "sources": windows})
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
