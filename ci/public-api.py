"""Prints the foreign names in a crate's public API, from the JSON that rustdoc writes: one a line, sorted.

A change of the major version of a crate that is named here is a breaking change of ours. The standard library is left
out; so are implementations that the compiler makes for every type.
"""

import json
import sys

document = json.load(open(sys.argv[1]))
index, paths = document["index"], document["paths"]
crates = {0: None} | {int(number): crate["name"] for number, crate in document["external_crates"].items()}
found = set()


def names(value):
    """Notes every path in a signature."""
    if isinstance(value, list):
        for part in value:
            names(part)
    elif isinstance(value, dict):
        if "path" in value and "id" in value and "args" in value:
            entry = paths.get(str(value["id"]))
            crate = crates.get(entry["crate_id"]) if entry else None
            if crate not in (None, "std", "core", "alloc"):
                found.add("::".join(entry["path"]))
        for key, part in value.items():
            if key not in ("attrs", "docs", "links", "span"):
                names(part)


for item in index.values():
    if item["crate_id"] != 0:
        continue
    kind, inner = next(iter(item["inner"].items()))
    if kind == "impl" and (inner.get("is_synthetic") or inner.get("blanket_impl")):
        continue
    names(inner)
    if kind == "use" and str(inner["id"]) in paths:
        entry = paths[str(inner["id"])]
        if crates.get(entry["crate_id"]) not in (None, "std", "core", "alloc"):
            found.add("::".join(entry["path"]))

print("\n".join(sorted(found)))
