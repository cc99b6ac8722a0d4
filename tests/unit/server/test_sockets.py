"""The daemon's place: one holder, no strangers' files removed."""

import os
import socket
from pathlib import Path

import pytest

from prefixcache.server.config import ConfigError
from prefixcache.server.sockets import OnlyOwner, SocketPlace


def test_the_place_has_one_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "d.sock")
    place = SocketPlace(path)
    with pytest.raises(ConfigError, match=f"another daemon serves {path}, pid {os.getpid()}"):
        SocketPlace(path)
    place.close()
    SocketPlace(path).close()


def test_a_dead_daemons_socket_is_replaced_and_a_live_programs_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "d.sock")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen()
        with pytest.raises(ConfigError, match="another program serves"):
            SocketPlace(path)
    place = SocketPlace(path)
    assert not os.path.lexists(path)
    place.close()


def test_a_file_in_its_place_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        SocketPlace(str(path))
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another with --socket"):
        SocketPlace(str(tmp_path / "file" / "d.sock"))


def test_the_local_socket_is_for_its_user_and_the_mask_comes_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    place = SocketPlace(str(tmp_path / "d.sock"))
    with place.listen_local():
        assert os.stat(place.local_path).st_mode & 0o177 == 0
    with OnlyOwner():
        pass
    after = os.umask(before)
    assert after == before
    place.close()
    assert not os.path.lexists(place.local_path)
