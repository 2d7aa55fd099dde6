"""Reads a stream with pyarrow and hashes it with the Python of docs/formats/fingerprints.md.

python3 stream.py stream.arrow > stream.json
"""

import io
import json
import os
import re
import sys

import pyarrow as pa

page = open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../docs/formats/fingerprints.md"), encoding="utf-8"
).read()
code = re.search(r"```python\n(.*?)```", page, re.S).group(1)
exec(code)  # defines write_log

with pa.ipc.open_stream(sys.argv[1]) as stream:
    schema, records = stream.schema, list(stream)
out = {
    "pyarrow": pa.__version__,
    "schema": [f"{f.name}: {f.type}" for f in schema],
    "metadata": {k.decode(): v.decode() for k, v in schema.metadata.items()},
    "records": [r.num_rows for r in records],
    "rows": [row for r in records for row in r.to_pylist()],
}
b, length = int(out["metadata"]["mula.batch_size"]), int(out["metadata"]["mula.sequence_length"])
log = io.StringIO()
write_log(
    log, out["metadata"]["mula.plan"], length, b, ((i * b, r["tokens"].to_pylist()) for i, r in enumerate(records))
)
out["log"] = [json.loads(line) for line in log.getvalue().splitlines()]
# One row a line keeps the file readable and small.
rows = ",\n".join(json.dumps(r, separators=(",", ":")) for r in out.pop("rows"))
print(json.dumps(out, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n]}")
