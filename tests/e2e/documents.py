"""Programs in documents, made to run here: another daemon, another place of the model, nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SOCKET = "unix:///run/prefixcache/daemon.sock"


def programs(document: str, address: str, model: Path) -> list[str]:
    """The Python blocks of a document, in order. `document`: its path in the repository."""
    text = (ROOT / document).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks, document
    moved = [re.sub(r'^MODEL = ".*"$', f'MODEL = "{model}"', each, flags=re.MULTILINE) for each in blocks]
    return [each.replace(_SOCKET, address) for each in moved]


def reused(output: str) -> list[tuple[int, int]]:
    """(reused, looked up) of every line that tells them."""
    told = re.findall(r"(\d+) of (\d+) prompt tokens reused", output)
    return [(int(hits), int(tokens)) for hits, tokens in told]
