"""Plans and orders 1 and "blocks 1", written from docs/formats/plan.md, not from the Go code.

The first command writes every position of a plan. The second writes a plan with check values, of
sources with up to 10^9 windows and no files:

    python3 plan_v1.py order plan.json > order.json
    python3 plan_v1.py make > large.json
"""

import bisect
import hashlib
import heapq
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../index/testdata"))
from blocks_v1 import epoch_of
from order_v1 import key, permutation


class Tree:
    def __init__(self, weights):
        heap = [(w, i, i) for i, w in enumerate(weights) if w > 0]  # weight, rank among equals, node
        heapq.heapify(heap)
        self.children, serial = {}, len(weights)
        while len(heap) > 1:
            rw, _, right = heapq.heappop(heap)
            lw, _, left = heapq.heappop(heap)
            self.children[serial] = (lw, lw + rw, left, right)
            heapq.heappush(heap, (lw + rw, serial, serial))
            serial += 1
        self.root = heap[0][2]

    def at(self, y):
        node = self.root
        while node in self.children:
            a, s, left, right = self.children[node]
            q = y * a // s
            if (y + 1) * a // s > q:
                node, y = left, q
            else:
                node, y = right, y - q
        return node, y

    def counts(self, n, node=None):
        """Returns the number of positions of each source among the first n."""
        todo, result = [(self.root, n)], {}
        while todo:
            node, n = todo.pop()
            if node in self.children:
                a, s, left, right = self.children[node]
                todo += [(left, n * a // s), (right, n - n * a // s)]
            else:
                result[node] = n
        return result


class Plan:
    def __init__(self, plan):
        self.seed, self.sources = plan["seed"], plan["sources"]
        length = plan["sequence_length"]
        self.training = []
        for s in self.sources:
            windows = sum(max(0, shard["tokens"] - 1) // length for shard in s["shards"])
            self.training.append(windows - s["validation_windows"])
        self.stages, start, base = [], 0, [0] * len(self.sources)
        for stage in plan["stages"]:
            tree = Tree(stage["weights"])
            self.stages.append((start, tree, list(base)))
            for s, n in tree.counts(stage["samples"]).items():
                base[s] += n
            start += stage["samples"]
        self.length, self.permutations, self.shuffle = start, {}, plan.get("shuffle")

    def at(self, position):
        start, tree, base = self.stages[bisect.bisect_right([s[0] for s in self.stages], position) - 1]
        source, k = tree.at(position - start)
        epoch, i = divmod(base[source] + k, self.training[source])
        if (source, epoch) not in self.permutations:
            name, n = self.sources[source]["name"], self.training[source]
            if self.shuffle:
                windows = epoch_of(self.seed, name, epoch, n, self.shuffle["block"], self.shuffle["group"])
                self.permutations[source, epoch] = windows.__getitem__
            else:
                self.permutations[source, epoch] = permutation(n, key(self.seed, name, epoch))
        return source, epoch, self.permutations[source, epoch](i)


def check_positions(length):
    return sorted(
        set(range(min(8, length))) | {p for p in ((2 * j + 1) * length // 16 for j in range(8)) if p >= min(8, length)}
    )


def make():
    windows = [970_000_000, 65_536, 65_535, 12, 1_000_000_007, 1, 3_000_000]
    zero = "0" * 64
    plan = {
        "order": 1,
        "seed": 2**64 - 1,
        "sequence_length": 4096,
        "tokenizer": {"sha256": "5a" * 32, "vocabulary": 50280, "eod": 50279},
        "sources": [
            {
                "name": "source %d" % i if i else "größte",
                "validation_windows": n // 1000,
                "shards": [
                    {
                        "dtype": "uint16" if i % 2 else "int32",
                        "tokens": n * 4096 + 1 + i,
                        "documents": i,
                        "bin": zero,
                        "idx": zero,
                    }
                ],
            }
            for i, n in enumerate(windows)
        ],
        "stages": [
            {"samples": 10**9, "weights": [474, 3, 1, 1, 500, 0, 21]},
            {"samples": 7, "weights": [1, 1, 1, 1, 1, 1, 1]},
            {"samples": 12 * 10**8, "weights": [10**12, 1, 0, 2, 10**12, 1, 3]},
        ],
        "skips": [{"from": 5, "to": 6}, {"from": 10**9, "to": 10**9 + 10}],
    }
    order = Plan(plan)
    plan["checks"] = []
    for p in check_positions(order.length):
        source, _, window = order.at(p)
        plan["checks"].append({"position": p, "source": source, "window": window, "sample": "0" * 32})
    canonical = json.dumps(plan, ensure_ascii=False, separators=(",", ":")).encode()
    return {
        "format": 1,
        "fingerprint": hashlib.sha256(canonical).hexdigest(),
        "plan": plan,
        "written": {
            "validation": "0.001",
            "sources": [{"max_epochs": "", "paths": ["nowhere/%d" % i]} for i in range(len(windows))],
            "stages": [[""] * len(windows)] * 3,
        },
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        json.dump(make(), sys.stdout, ensure_ascii=False, indent=1)
    else:
        with open(sys.argv[2], encoding="utf-8") as f:
            plan = json.load(f)["plan"]
        order = Plan(plan)
        if order.length <= 10000:
            positions = range(order.length)
        else:
            positions = [i * order.length // 200 for i in range(200)] + [order.length - 1]
        rows = [[p, *order.at(p)] for p in positions]
        json.dump(
            {"python": sys.version.split()[0], "columns": "position, source, epoch, window", "rows": rows},
            sys.stdout,
            separators=(",", ":"),
        )
    print()
