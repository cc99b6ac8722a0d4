"""A data directory was moved away and an empty one put in its place. A namespace that was registered before anybody
noticed made `namespaces.log` there, by its path, and the new directory was refused for holding a file but no format."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixcache_offload.disk.directory import open_directory
from prefixcache_offload.disk.namespaces import NamespaceBook
from prefixcache_offload.disk.seam import RealDisk


def test_nothing_is_made_in_another_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    directory = open_directory(RealDisk(), str(data))
    book = NamespaceBook(directory, 1 << 20)
    data.rename(tmp_path / "away")
    data.mkdir()
    attempts = (
        lambda: book.register(bytes(range(32)), b"spec"),
        lambda: book.forget_others(()),
        lambda: directory.open_segment(1, create=True),
        directory.probe,
    )
    for attempt in attempts:
        with pytest.raises(FileNotFoundError, match="in the place of this one"):
            attempt()
    assert os.listdir(data) == []
    directory.close()
    open_directory(RealDisk(), str(data)).close()
