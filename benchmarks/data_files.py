"""Opening and reading a large prompt file: seconds, rows per second, memory.

Writes a jsonl file of the given size (and the same rows as parquet) into a temporary folder; each measurement runs in
a process of its own, so that peak memory is that of the reader alone.

    python benchmarks/data_files.py
    python benchmarks/data_files.py --megabytes 50 --no-write
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import describe, write_result  # noqa: E402
from slime.utils.data import Dataset  # noqa: E402
from slime.utils.rows import JsonlRows, open_rows  # noqa: E402

READS = 20_000


def write_files(folder: Path, megabytes: int) -> tuple[str, str, int]:
    """(jsonl, parquet, rows): prompts of 100 to 4,000 characters with label and metadata."""
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(1000)]
    jsonl, columnar = folder / "rows.jsonl", folder / "rows.parquet"
    rows = size = 0
    schema = pyarrow.schema([("input", "string"), ("label", "string"), ("metadata", "string")])
    with jsonl.open("w") as file, parquet.ParquetWriter(columnar, schema) as writer:
        while size < megabytes * 10**6:
            chunk = []
            for _ in range(10_000):
                text = " ".join(rng.choices(words, k=rng.randint(15, 600)))
                chunk.append({"input": text, "label": str(rows), "metadata": json.dumps({"row": rows})})
                size += file.write(json.dumps({**chunk[-1], "metadata": {"row": rows}}) + "\n")
                rows += 1
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema))
    return str(jsonl), str(columnar), rows


def _memory() -> float:
    """Peak resident memory of this process, in MB (ru_maxrss would count the parent's)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def _read(rows, count: int) -> float:
    rng = random.Random(1)
    started = time.perf_counter()
    for _ in range(count):
        rows[rng.randrange(len(rows))]
    return count / (time.perf_counter() - started)


def measure(kind: str, path: str) -> dict:
    """What one way of reading costs; runs in its own process."""
    before, started = _memory(), time.perf_counter()
    if kind == "index":
        rows = JsonlRows(path)
    elif kind == "dataset":
        rows = Dataset(path, label_key="label")
    else:
        rows = open_rows(path, ("input", "label", "metadata"))
    opened = time.perf_counter() - started
    size = os.path.getsize(path.split("@")[0])
    return {
        "open_seconds": round(opened, 2),
        "open_megabytes_per_second": round(size / opened / 1e6),
        "rows": len(rows),
        "random_rows_per_second": round(_read(rows, READS)),
        "memory_growth_mb": round(_memory() - before, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--no-write", action="store_true", help="write no result file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        jsonl, columnar, rows = write_files(Path(folder), args.megabytes)
        cases = {
            "jsonl index": ("index", jsonl),
            "jsonl data set, every row checked": ("dataset", jsonl),
            "parquet": ("rows", columnar),
            "parquet, 1 % slice": ("rows", f"{columnar}@[{rows // 2}:{rows // 2 + rows // 100}]"),
        }
        result = {"megabytes": args.megabytes, "rows": rows}
        spawn = multiprocessing.get_context("spawn")
        for name, case in cases.items():
            with spawn.Pool(1) as pool:
                result[name] = pool.apply(measure, case)
            print(f"{name:36}", *(f"{key} {value}" for key, value in result[name].items()), flush=True)
    result["machine"] = describe("pyarrow")
    if not args.no_write:
        print(write_result("data-files", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
