"""Prints what identity makes of a checkpoint folder, as one JSON object; run by tests with different transformers.

Usage: python describe_checkpoint.py FOLDER [KV_DTYPE]. Needs transformers, msgpack and numpy, prefixcache on the path,
and no torch. `object` is what transformers' own config object gives, `file` what the bare config.json gives.
"""

import json
import sys
from pathlib import Path
from typing import Any

from prefixcache.identity.model import Namespace, namespace_from_hf
from prefixcache.identity.weights import weights_digest


def describe(folder: str | Path, kv_dtype: str = "bfloat16") -> dict[str, Any]:
    """Fingerprint, weights digest and normal forms of a checkpoint, by the transformers at hand and by its JSON."""
    import transformers  # whichever version this interpreter has

    weights = weights_digest(folder)
    opened = transformers.AutoConfig.from_pretrained(str(folder))
    written = json.loads((Path(folder) / "config.json").read_text())
    namespaces = {
        "object": namespace_from_hf(opened, weights, kv_dtype),
        "file": namespace_from_hf(written, weights, kv_dtype),
    }
    described = {name: _plain(namespace) for name, namespace in namespaces.items()}
    return {"transformers": transformers.__version__, "weights": weights.hex(), **described}


def _plain(namespace: Namespace) -> dict[str, Any]:
    spec = namespace.spec_map
    return {
        "fingerprint": namespace.fingerprint.hex(),
        "rope": spec["rope"],
        "config": spec["config"],
        "layout": spec["layout"],
    }


if __name__ == "__main__":
    print(json.dumps(describe(*sys.argv[1:])))
