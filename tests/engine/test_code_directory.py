"""Which files of a directory are sent as code."""

from __future__ import annotations

import io
import os
import re
import tarfile
from pathlib import Path

import pytest

from airflow_provider_ktrain.core.errors import ManifestError, ManifestUnreadableError
from airflow_provider_ktrain.engine.submit.code_directory import MAX_FILES, MAX_UNPACKED_BYTES, read_code


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def packed(root: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(read_code(root).archive)) as archive:
        return {member.name: member for member in archive}


def test_same_content_has_the_same_hash_wherever_it_is(tmp_path: Path) -> None:
    for copy in ("a", "b"):
        write(tmp_path / copy, "train.py", "lib/model.py")
    os.utime(tmp_path / "a/train.py", (1, 1))
    (tmp_path / "b/lib/model.py").chmod(0o600)
    assert read_code(tmp_path / "a") == read_code(tmp_path / "b")


def test_archive_has_modes_but_neither_owners_nor_times(tmp_path: Path) -> None:
    write(tmp_path, "run.sh", "train.py")
    (tmp_path / "run.sh").chmod(0o700)
    members = packed(tmp_path)
    assert {name: oct(member.mode) for name, member in members.items()} == {"run.sh": "0o755", "train.py": "0o644"}
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, 0, "", "")}


def test_ignored_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "data/a.bin", "lib/data/b.bin", "notes.txt", "keep.txt")
    write(tmp_path, ".git/config", "lib/__pycache__/x.pyc", ".venv/bin/python", "lib/mine.pyc", "sub/.ktrainignore")
    (tmp_path / ".ktrainignore").write_text("# data sets\n/data/\n*.txt\n!keep.txt\n!mine.pyc\n")
    assert list(packed(tmp_path)) == ["keep.txt", "lib/data/b.bin", "lib/mine.pyc", "sub/.ktrainignore", "train.py"]


@pytest.mark.parametrize("pattern", ["!", "\\", "[z-a]"])
def test_invalid_pattern_is_named_with_its_line(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, "train.py")
    (tmp_path / ".ktrainignore").write_text(f"# data\n{pattern}\n")
    with pytest.raises(ManifestError) as error:
        read_code(tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path}/.ktrainignore:2: .ktrainignore has an invalid pattern; found {pattern!r}"
    )


def test_single_file_is_sent_under_its_name(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "other.py")
    assert list(packed(tmp_path / "train.py")) == ["train.py"]


def test_links_inside_the_directory_are_kept(tmp_path: Path) -> None:
    write(tmp_path, "lib/v2/model.py", "train.py")
    (tmp_path / "lib/current").symlink_to("v2")
    (tmp_path / "lib/main.py").symlink_to(tmp_path / "train.py")
    found = {name: member.linkname for name, member in packed(tmp_path).items() if member.issym()}
    assert found == {"lib/current": "v2", "lib/main.py": "../train.py"}


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "loop"])
def test_link_out_of_the_directory_is_refused(tmp_path: Path, target: str) -> None:
    write(tmp_path, "secret", "code/train.py")
    (tmp_path / "code/loop").symlink_to("../secret")
    (tmp_path / "code/link").symlink_to(target)
    with pytest.raises(ManifestError, match=r"code: a symbolic link leads out of the code's directory; found li|lo"):
        read_code(tmp_path / "code")


def test_ignored_link_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / ".ktrainignore").write_text("link\n")
    assert list(packed(tmp_path)) == ["train.py"]


def test_special_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ManifestError, match="the code has a special file"):
        read_code(tmp_path)


def test_missing_directory_is_worth_a_retry(tmp_path: Path) -> None:
    with pytest.raises(ManifestUnreadableError, match="the code can't be read: No such file") as error:
        read_code(tmp_path / "missing")
    assert not error.value.final


def test_large_files_are_refused_without_reading_them(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    with open(tmp_path / "data.bin", "wb") as file:
        file.truncate(100 * MAX_UNPACKED_BYTES)
    with pytest.raises(ManifestError, match=r"the code is too large: 3\.1 GiB in 2 files") as error:
        read_code(tmp_path)
    assert "data.bin (3.1 GiB), train.py (8 bytes)" in str(error.value)


def test_directory_of_the_largest_size_is_sent(tmp_path: Path) -> None:
    with open(tmp_path / "zeros.bin", "wb") as file:
        file.truncate(MAX_UNPACKED_BYTES)
    assert read_code(tmp_path).files == 1


def test_large_tree_is_not_listed_to_its_end(tmp_path: Path) -> None:
    for name, number in (("frames", MAX_FILES + 100), ("src", 3)):
        (tmp_path / name).mkdir()
        for n in range(number):
            (tmp_path / name / f"{n}.txt").touch()
    with pytest.raises(ManifestError, match=r"the code has more than 10,000 files") as error:
        read_code(tmp_path)
    assert re.search(r"found [\d,]+ files in frames/", str(error.value))
    (tmp_path / ".ktrainignore").write_text("frames/")
    assert read_code(tmp_path).files == 3


def test_large_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with open(tmp_path / "model.bin", "wb") as file:
        file.truncate(100 * MAX_UNPACKED_BYTES)
    with pytest.raises(ManifestError, match=r"the code is too large: 3\.1 GiB in 1 file"):
        read_code(tmp_path / "model.bin")
