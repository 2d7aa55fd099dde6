"""Order version 2 of sources that have grown, written from docs/formats/plan.md, not from the Go
code.

It uses the lists that the page describes. This writes plans that amend another, with check values
and positions:

    python3 plan_v2.py > amended.json
"""

import hashlib
import json
import sys

from plan_v1 import Plan, check_positions, key, permutation


def growth_key(seed, name, number):
    name = name.encode()
    text = (
        b"mula growth 2"
        + seed.to_bytes(8, "little")
        + len(name).to_bytes(8, "little")
        + name
        + number.to_bytes(8, "little")
    )
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Source:
    """The samples of a source in order, for sources that are small enough for a list."""

    def __init__(self, seed, length, source):
        windows = [max(0, shard["tokens"] - 1) // length for shard in source["shards"]]
        self.seed, self.name, self.growth = seed, source["name"], source["growth"]
        first = len(windows) - sum(g["shards"] for g in self.growth)
        parts = [(first, source["validation_windows"] - sum(g["validation_windows"] for g in self.growth))]
        parts += [(g["shards"], g["validation_windows"]) for g in self.growth]
        self.numbers, self.training, at, number = [], [], 0, 0  # training number -> window; M of each part
        for shards, held in parts:
            count = sum(windows[at : at + shards])
            self.numbers += range(number, number + count - held)
            self.training.append(len(self.numbers))
            number, at = number + count, at + shards
        self.samples, self.epochs, self.known = [], 0, 0  # (epoch, window) of each sample; past growths

    def epoch(self):
        start, m = len(self.samples), self.training[self.known]
        pi = permutation(m, key(self.seed, self.name, self.epochs))
        order = [pi(i) for i in range(m)]
        while self.known < len(self.growth) and self.growth[self.known]["sample"] < start + len(order):
            order += range(self.training[self.known], self.training[self.known + 1])
            r = self.growth[self.known]["sample"] - start
            sigma = permutation(len(order) - r, growth_key(self.seed, self.name, self.known))
            order = order[:r] + [order[r + sigma(j)] for j in range(len(order) - r)]
            self.known += 1
        self.samples += [(self.epochs, self.numbers[t]) for t in order]
        self.epochs += 1

    def at(self, k):
        while len(self.samples) <= k:
            self.epoch()
        return self.samples[k]


class AmendedPlan(Plan):
    def __init__(self, plan):
        super().__init__(plan)
        self.listed = [Source(self.seed, plan["sequence_length"], s) for s in self.sources]

    def at(self, position):
        for start, tree, base in reversed(self.stages):
            if start <= position:
                source, k = tree.at(position - start)
                return (source, *self.listed[source].at(base[source] + k))


def make(seed, length, sources, stages, parents):
    zero = "0" * 64
    plan = {
        "order": 2,
        "parents": parents,
        "seed": seed,
        "sequence_length": length,
        "tokenizer": None,
        "sources": [],
        "stages": [{"samples": n, "weights": w} for n, w in stages],
        "skips": [],
        "checks": [],
    }
    for name, held, growth, windows in sources:
        plan["sources"].append(
            {
                "name": name,
                "validation_windows": held,
                "growth": [{"sample": k, "shards": n, "validation_windows": v} for k, n, v in growth],
                "shards": [
                    {"dtype": "uint16", "tokens": n * length + 1, "documents": 1, "bin": zero, "idx": zero}
                    for n in windows
                ],
            }
        )
    order = AmendedPlan(plan)
    rows = [[p, *order.at(p)] for p in range(order.length)]
    plan["checks"] = [
        {"position": p, "source": rows[p][1], "window": rows[p][3], "sample": "0" * 32}
        for p in check_positions(order.length)
    ]
    canonical = json.dumps(plan, ensure_ascii=False, separators=(",", ":")).encode()
    file = {
        "format": 1,
        "fingerprint": hashlib.sha256(canonical).hexdigest(),
        "plan": plan,
        "written": {
            "validation": "",
            "sources": [
                {"max_epochs": "", "paths": ["nowhere/%s/%d" % (s[0], i) for i in range(len(s[3]))]} for s in sources
            ],
            "stages": [[""] * len(sources)] * len(stages),
        },
    }
    if len(rows) > 2000:  # above 65,535 windows a source uses a network; some positions are enough
        rows = rows[:: len(rows) // 500]
    return {"file": file, "rows": rows}


if __name__ == "__main__":
    parent = [{"fingerprint": "ab" * 32, "at": 0, "reason": "größere Quelle"}]
    plans = {
        # A growth in the first epoch; a second growth in the rest of it; a growth at the end of an
        # epoch; a growth before the first sample of another source.
        "several growths": make(
            6198,
            16,
            [
                ("web", 7, [(40, 1, 2), (60, 2, 0), (171, 1, 1)], [50, 30, 33, 20, 25, 41]),
                ("late", 0, [(0, 1, 0)], [9, 4]),
                ("wiki", 1, [], [12]),
            ],
            [(100, [7, 0, 3]), (500, [5, 2, 2])],
            parent * 3,
        ),
        # Growths far beyond the first epoch, two at the same sample, and one without a training
        # window.
        "later epochs": make(
            2**64 - 1,
            8,
            [("größte", 4, [(1000, 1, 0), (1000, 1, 3), (2000, 1, 1)], [17, 30, 20, 1])],
            [(5000, [1])],
            parent * 2,
        ),
        # Lists of more than 65,535 windows, before the growth and after it.
        "networks": make(
            1, 4, [("a", 0, [(30000, 1, 0), (65536, 1, 0)], [60000, 40000, 70000])], [(200000, [1])], parent
        ),
    }
    for p in plans.values():
        p["rows"] = "\n".join(" ".join(map(str, row)) for row in p["rows"])
    json.dump(
        {"python": sys.version.split()[0], "columns": "position, source, epoch, window", "plans": plans},
        sys.stdout,
        ensure_ascii=False,
        indent=1,
    )
    print()
