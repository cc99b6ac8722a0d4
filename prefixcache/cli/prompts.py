"""A prompt as the user names it, and its block keys in one namespace of the daemon.

Keys are computed here, as every client does: the daemon never sees the prompt. It must not know what is asked about it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from prefixcache.cli import namespaces, token_files
from prefixcache.cli.daemon import Daemon
from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.identity import KEY_BYTES, block_keys, root_key
from prefixcache.v1 import admin_pb2

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Prompt:
    """What the user named: a file, how to read it, what else went into its keys, and which namespace."""

    file: str
    tokenizer: Path | None = None
    cache_salt: str = ""
    tenant_key_file: Path | None = None
    namespace: str | None = None
    first_tokens: int | None = None  # only so many from the front

    def tokens(self) -> bytes:
        """Token ids, packed. Raises CliError."""
        content = token_files.read_bytes(self.file)
        if self.tokenizer is not None:
            whole = token_files.tokenize(content, self.file, self.tokenizer)
        else:
            whole = token_files.parse_tokens(content, self.file)
        if self.first_tokens is None:
            return whole
        if self.first_tokens * _TOKEN_BYTES > len(whole):
            raise bad_usage(f"{self.file} has {len(whole) // _TOKEN_BYTES} tokens", "give a smaller --tokens")
        return whole[: self.first_tokens * _TOKEN_BYTES]

    def keys_at(self, daemon: Daemon) -> Keys:
        """Its keys in the namespace that is meant. Raises CliError where nothing of it can be cached."""
        tokens = self.tokens()
        chosen = namespaces.choose(daemon.stats(), self.namespace)
        keys = block_keys(self._root(chosen.fingerprint), tokens, chosen.block_tokens)
        if not keys:
            what = f"{len(tokens) // _TOKEN_BYTES} tokens are less than one block of {chosen.block_tokens}"
            raise CliError(f"{what}: nothing of it can be cached", reason="partial_block")
        return Keys(chosen, keys, len(tokens) // _TOKEN_BYTES)

    def _root(self, fingerprint: bytes) -> bytes:
        secret = None if self.tenant_key_file is None else _read_secret(self.tenant_key_file)
        try:
            return root_key(fingerprint, tenant_key=secret, cache_salt=self.cache_salt.encode())
        except ValueError as error:
            raise bad_usage(str(error), "a tenant key file holds exactly 32 secret bytes") from error


@dataclass(frozen=True)
class Keys:
    """Keys of a prompt's whole blocks, packed, in one namespace."""

    namespace: admin_pb2.NamespaceStats
    packed: bytes
    prompt_tokens: int

    @property
    def fingerprint(self) -> bytes:
        """The namespace's."""
        return self.namespace.fingerprint

    def up_to(self, token: int) -> bytes:
        """Keys down to the block that holds `token`."""
        return self.packed[: (token // self.namespace.block_tokens + 1) * KEY_BYTES]

    def named(self) -> dict[str, str]:
        """The namespace as every answer shows it."""
        return {"label": self.namespace.label, "fingerprint": self.namespace.fingerprint.hex()}


def _read_secret(path: Path) -> bytes:
    """The tenant key; refused when others may read it, as ssh refuses such keys."""
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise bad_usage(f"{path} can be read by others", f"chmod 600 {path}")
        secret = path.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read {path}: {os.strerror(error.errno or 0)}", reason="bad_file") from error
    return secret if len(secret) == KEY_BYTES else secret.strip()
