"""The names of the policies.

Belongs here: names alone. It imports nothing heavy, so that a command line which only checks one starts at once.
"""

from typing import Final

NAMES: Final = ("lru", "lru2", "arc", "s3fifo", "gdsf", "tg")
DEFAULT: Final = "lru"
