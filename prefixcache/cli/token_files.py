"""Prompts as files: token ids in three forms, or text and a tokenizer.

Rules: a token file is a JSON list, integers with white space or commas between them, or raw little-endian u32; the
first two are recognised by holding nothing but such text. Every failure names the file and what would do. It must not
know the daemon. Nothing here prints a token or a word of the prompt.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Final

from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.identity import pack_tokens

STDIN: Final = "-"
_NUMBERS: Final = re.compile(rb"[\d\s,]*")
_FORMS: Final = "a JSON list of token ids, integers separated by white space, or raw little-endian u32"


def read_bytes(name: str) -> bytes:
    """What the file, or standard input for `-`, holds. Raises CliError."""
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}", reason="bad_file") from error


def parse_tokens(content: bytes, name: str) -> bytes:
    """Token ids of a token file as packed little-endian u32. Raises CliError."""
    text = content.strip()
    try:
        if text.startswith(b"["):
            ids = json.loads(text)
            if not isinstance(ids, list) or not all(type(item) is int for item in ids):
                raise ValueError("the JSON list holds something else than integers")
            return bytes(pack_tokens(ids))
        if _NUMBERS.fullmatch(text):
            return bytes(pack_tokens([int(word) for word in text.replace(b",", b" ").split()]))
        return bytes(pack_tokens(content))
    except ValueError as error:
        hint = f"a token file is {_FORMS}; for text, name a tokenizer folder with --tokenizer"
        raise CliError(f"{name} is not a token file: {error}", hint, reason="bad_file") from error


def tokenize(content: bytes, name: str, folder: Path) -> bytes:
    """Token ids, packed, that the tokenizer in `folder` makes of UTF-8 text. Never goes to the network."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{name} is not UTF-8 text", "without --tokenizer it is read as a token file") from error
    if not folder.is_dir():
        raise bad_usage(f"no tokenizer folder at {folder}", "--tokenizer takes the folder that holds tokenizer.json")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install 'prefixcache[transformers]', or give a token file"
        raise CliError("reading text needs the transformers package", hint, reason="missing_package") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CliError(f"{folder} holds no tokenizer that transformers can read", reason="bad_file") from error
    return bytes(pack_tokens(tokenizer(text)["input_ids"]))
