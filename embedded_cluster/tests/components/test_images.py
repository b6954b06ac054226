"""Images: names mapped to directories, and the commands in their Dockerfiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktrain_embedded.node.images import REFERENCE, ImageNotFound, Images, binaries

DOCKERFILE = """\
FROM python:3.11-slim AS base
CMD ["of", "the", "first", "stage"]
FROM base
RUN echo CMD is no instruction here
ENTRYPOINT ["python3", \\
  "train.py"]
cmd ["--epochs", "5"]
"""


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({}, ["python3", "train.py", "--epochs", "5"]),
        ({"args": ["--backend", "nccl"]}, ["python3", "train.py", "--backend", "nccl"]),
        ({"command": ["true"]}, ["true"]),
        ({"command": ["echo"], "args": ["a"]}, ["echo", "a"]),
    ],
)
def test_manifest_overrides_the_dockerfile(tmp_path: Path, given: dict[str, list[str]], runs: list[str]) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    container = Images.entrypoint({"name": "c", "image": "mnist:1", **given}, tmp_path)
    assert [*container.get("command", ()), *container.get("args", ())] == runs


def test_shell_form_of_cmd_runs_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("CMD python3 train.py | tee log\n")
    assert Images.entrypoint({"image": "i"}, tmp_path)["args"] == ["/bin/sh", "-c", "python3 train.py | tee log"]


def test_directory_without_dockerfile_has_no_command(tmp_path: Path) -> None:
    assert not Images.entrypoint({"image": "i"}, tmp_path)["command"]
    assert not Images.entrypoint({"image": "i"}, None)["args"]


def test_directories_with_programs_of_an_image_are_found(tmp_path: Path) -> None:
    (tmp_path / "usr/local/bin").mkdir(parents=True)
    assert binaries(tmp_path) == [str(tmp_path / "usr/local/bin")]


DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("image", "valid"),
    [
        *(
            (name, True)
            for name in ("train", "train:1", "a/b__c/d-e.f:V1.2-x", "localhost:5000/train", f"train@{DIGEST}")
        ),
        *((name, True) for name in (f"Registry.Example:443/a/b:1@{DIGEST}", "docker.io/library/python:3.11-slim")),
        *(
            (name, False)
            for name in ("Train", "train:", "train:a:b", "a b", "a//b", "/a", "-a", "a@sha256:12", "a/B:1")
        ),
        *((name, False) for name in ("{{ params.image }}", "https://registry.example/train", "train:ä")),
    ],
)
def test_image_references_are_validated(image: str, valid: bool) -> None:
    assert bool(REFERENCE.fullmatch(image)) is valid


def test_image_names_are_mapped_to_directories(tmp_path: Path) -> None:
    images = Images({"horovod/horovod": tmp_path, "exact:1": tmp_path})
    assert images.directory("docker.io/horovod/horovod:0.20.0") == tmp_path
    assert images.directory("exact:1") == tmp_path
    with pytest.raises(ImageNotFound, match="--image exact:2=DIR"):
        images.directory("exact:2")
