"""Writers of small data files."""

import json


def write_jsonl(path, rows) -> str:
    with open(path, "w") as file:
        for row in rows:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    return str(path)
