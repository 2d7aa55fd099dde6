"""Reads an event file with TensorBoard's own code and prints its scalars.

Run: python read.py golden.tfevents

read.txt is its output for golden.tfevents.
"""

import sys

import tensorboard
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader

print("tensorboard", tensorboard.__version__, "python", sys.version.split()[0])
for event in EventFileLoader(sys.argv[1]).Load():
    what = event.file_version or ("session " + str(event.session_log.status) if event.HasField("session_log") else "")
    print(repr(event.wall_time), event.step, what, [(v.tag, v.tensor.float_val[0]) for v in event.summary.value])
print(sum(1 for _ in RawEventFileLoader(sys.argv[1]).Load()), "records, all checksums right")
