"""The admin socket file: modes, ownership, stale files, one owner, and who the peer is."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.sockets import AdminGroups, AdminSocket, Peer

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to act as another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lorad.sock"


def test_socket_is_for_its_owner_alone(path: Path) -> None:
    old_mask = os.umask(0)  # the weakest umask must change nothing
    try:
        with AdminSocket(path):
            assert mode(path) == 0o600
            assert mode(path.parent) == 0o700
            assert mode(path.with_suffix(".lock")) == 0o600
    finally:
        assert os.umask(old_mask) == 0  # and the process's own umask is back


@as_root
def test_admin_group_may_open_the_socket(path: Path) -> None:
    with AdminSocket(path, AdminGroups.named("daemon", "")) as bound:
        assert mode(path) == 0o660
        assert mode(path.parent) == 0o750
        assert path.stat().st_gid == path.parent.stat().st_gid == bound.groups.admin


def test_unknown_group_is_a_config_error(path: Path) -> None:
    with pytest.raises(LoradError) as caught:
        AdminSocket(path, AdminGroups.named("", "no-such-group"))
    assert caught.value.code == "config.invalid"


def test_close_removes_the_file_and_frees_the_path(path: Path) -> None:
    AdminSocket(path).close()
    assert not path.exists()
    with AdminSocket(path):
        assert path.is_socket()


def test_close_leaves_a_file_that_is_not_ours(path: Path) -> None:
    bound = AdminSocket(path)
    path.unlink()
    path.write_text("somebody else's")
    bound.close()
    bound.close()
    assert path.read_text() == "somebody else's"


def test_second_daemon_is_refused_and_the_first_goes_on(path: Path) -> None:
    with AdminSocket(path):
        with pytest.raises(LoradError) as caught:
            AdminSocket(path)
        assert caught.value.code == "daemon.already_running"
        assert caught.value.details == {"pid": os.getpid()}
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_socket_left_by_a_killed_daemon_is_replaced(path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from lorad.sockets import AdminGroups, AdminSocket
        bound = AdminSocket(Path({str(path)!r}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert path.is_socket()
    with AdminSocket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_foreign_listener_is_not_pushed_aside(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(LoradError) as caught:
            AdminSocket(path)
        assert caught.value.code == "socket.in_use"
        assert path.is_socket()


@pytest.mark.parametrize("kind", ["file", "symlink", "directory"])
def test_what_is_not_a_socket_is_never_removed(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    target = path.parent / "precious"
    target.write_text("kept")
    if kind == "file":
        path.write_text("kept")
    elif kind == "symlink":
        path.symlink_to(target)
    else:
        path.mkdir()
    with pytest.raises(LoradError) as caught:
        AdminSocket(path)
    assert caught.value.code == "socket.in_use"
    assert path.lstat()
    assert target.read_text() == "kept"


def test_directory_that_others_can_write_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(LoradError) as caught:
        AdminSocket(path)
    assert caught.value.code == "socket.permission"
    assert list(path.parent.iterdir()) == []


def test_directory_behind_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoradError) as caught:
        AdminSocket(path)
    assert caught.value.code == "socket.permission"


@as_root
def test_directory_of_another_user_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.chown(path.parent, 1, 1)
    with pytest.raises(LoradError) as caught:
        AdminSocket(path)
    assert caught.value.code == "socket.permission"


def test_path_that_no_socket_can_have(tmp_path: Path) -> None:
    with pytest.raises(LoradError) as caught:
        AdminSocket(tmp_path / ("x" * 120) / "lorad.sock")
    assert caught.value.code == "config.invalid"


def test_kernel_names_the_peer(path: Path) -> None:
    with AdminSocket(path) as bound:
        bound.socket.setblocking(True)
        connect = (
            f"import socket; s=socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); input()"
        )
        client = subprocess.Popen([sys.executable, "-c", connect], stdin=subprocess.PIPE)
        try:
            connection, _ = bound.socket.accept()
            with connection:
                peer = Peer.of(connection)
        finally:
            client.communicate(b"\n")
    assert (peer.pid, peer.uid, peer.gid) == (client.pid, os.geteuid(), os.getegid())
    assert set(peer.groups) == set(os.getgroups())
    assert peer.role(AdminGroups()) == "admin"


def test_roles_are_those_of_the_groups() -> None:
    stranger = Peer(pid=1, uid=4_000_000, gid=7, groups=(8, 9))
    assert stranger.role(AdminGroups()) == "none"
    assert stranger.role(AdminGroups(admin=6, read=5)) == "none"
    assert stranger.role(AdminGroups(admin=7)) == "admin"
    assert stranger.role(AdminGroups(admin=9, read=7)) == "admin"
    assert stranger.role(AdminGroups(admin=6, read=8)) == "read"


def test_with_two_groups_the_file_is_the_readers(path: Path) -> None:
    with AdminSocket(path, AdminGroups.named("daemon", "mail")) as bound:
        assert path.stat().st_gid == bound.groups.read != bound.groups.admin
