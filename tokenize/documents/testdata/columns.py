#!/usr/bin/env python3
"""Writes columns.json: small Parquet and Arrow files of pyarrow 26.0.1 in base64, with their
documents.

Run in this folder: python3 columns.py
"""

import base64
import io
import json

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

ROWS = 12
TEXTS = [
    None if i == 5 else "" if i == 7 else "é" * (i % 3) + "text %d, 日本 😀\n" % (i % 4) * (1 + i % 5)
    for i in range(ROWS)
]
IDS = [None if i % 4 == 3 else "doc-%d" % (i * i) for i in range(ROWS)]
NUMBERS = [None if i % 4 == 3 else (-3) ** (i * 3) for i in range(ROWS)]


def documents(texts, ids):
    return [[-1 if t is None else t, "" if i is None else str(i)] for t, i in zip(texts, ids)]


cases = []


def case(name, data, texts=TEXTS, ids=IDS, text="text", id="id"):
    cases.append(
        {
            "name": name,
            "file": base64.b64encode(data).decode(),
            "text": text,
            "id": id,
            "documents": documents(texts, ids),
        }
    )


def parquet(name, table, **options):
    expected = {k: options.pop(k) for k in ("texts", "ids", "text", "id") if k in options}
    out = io.BytesIO()
    options.setdefault("row_group_size", 5)
    pq.write_table(table, out, store_schema=False, **options)
    case(name + ".parquet", out.getvalue(), **expected)


def arrow(name, table, codec=None, stream=False, **expected):
    out = io.BytesIO()
    with (ipc.new_stream if stream else ipc.new_file)(
        out, table.schema, options=ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        for batch in table.to_batches(max_chunksize=5):
            writer.write_batch(batch)
    case(name + ".arrow", out.getvalue(), **expected)


table = pa.table({"x": range(ROWS), "id": IDS, "text": TEXTS, "list": [["no"]] * ROWS})
nested = pa.table({"m": [None if t is None else {"a": {"url": i}, "t.x": t} for t, i in zip(TEXTS, IDS)]})
nested_ids = [None if t is None else i for t, i in zip(TEXTS, IDS)]
for codec in ("none", "snappy", "gzip", "zstd", "lz4"):
    for version in ("1.0", "2.0"):
        parquet(codec + version, table, compression=codec, data_page_version=version, write_page_checksum=True)
for encoding in ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"):
    parquet(encoding, table, use_dictionary=False, column_encoding={"text": encoding, "id": encoding})
for kind in (pa.int64(), pa.int32()):
    numbers = [None if n is None else n if kind == pa.int64() else n % 1000 - 500 for n in NUMBERS]
    for encoding in ("PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"):
        parquet(
            "%s%s" % (kind, encoding),
            pa.table({"id": pa.array(numbers, kind), "text": TEXTS}),
            use_dictionary=False,
            column_encoding={"id": encoding},
            ids=numbers,
        )
unsigned = [None if n is None else n % 2**64 for n in NUMBERS]
parquet("uint64", pa.table({"id": pa.array(unsigned, pa.uint64()), "text": TEXTS}), ids=unsigned)
parquet("nested", nested, text="m.t\\.x", id="m.a.url", ids=nested_ids)
for codec in (None, "lz4", "zstd"):
    for stream in (False, True):
        arrow("%s%s" % (codec, "stream" if stream else ""), table, codec, stream)
for kind in (pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary_view()):
    arrow(str(kind), pa.table({"id": pa.array(unsigned, pa.uint64()), "text": pa.array(TEXTS, kind)}), ids=unsigned)
arrow("dictionary", pa.table({"id": IDS, "text": pa.array(TEXTS).dictionary_encode()}))
arrow("nested", nested, text="m.t\\.x", id="m.a.url", ids=nested_ids)
with open("columns.json", "w") as out:
    out.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]\n")
