"""One rank of a run without torch, for test_resume.py.

It reads batches, and writes its state after each 256 positions.
"""

import json
import os
import sys
import time
from pathlib import Path

import mula

plan, folder, checkpoint, batch_size, rank, world, slow = sys.argv[1:]
data = mula.Stream(plan, int(batch_size), int(rank), int(world), log=os.path.join(folder, "log"), arrays="numpy")
data.load_state_dict(json.loads(checkpoint))
for batch in data:
    state = data.state_dict()
    if state["position"] % 256 == 0:
        new = Path(folder, f"new{rank}")
        new.write_text(json.dumps(state))
        os.replace(new, Path(folder, f"state{rank}of{world}"))
    time.sleep(float(slow))
