from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.manifest.loader import load_documents, plain, the_job
from airflow_provider_ktrain.manifests import load

from .manifests import DATA, GUIDES, JSON, pytorchjob

TEXT = yaml.safe_dump(pytorchjob())


@pytest.mark.parametrize("guide", GUIDES)
def test_file_text_and_dict_load_the_same_manifest(guide: str) -> None:
    path = DATA / guide
    from_file = load(path)
    assert from_file == load(str(path)) == load(path.read_text()) == load(from_file)
    assert from_file["kind"] in ("PyTorchJob", "MPIJob")


def test_json_indented_by_tabs_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(pytorchjob(), indent="\t"))
    assert load(file) == load(file.read_text()) == pytorchjob()


def test_loaded_manifest_shares_no_objects() -> None:
    source = pytorchjob()
    loaded = load(source)
    loaded["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 7
    assert source == pytorchjob()

    aliased = load("kind: PyTorchJob\na: &r {replicas: 1}\nb: *r\n")
    aliased["a"]["replicas"] = 5
    assert aliased["b"] == {"replicas": 1}


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("22:10", "22:10"),  # not 1330: Kubernetes' YAML has no base-60 numbers
        ("2026-11-21", "2026-11-21"),
        ("010", 8),
        ("0o10", 8),
        ("0x1F", 31),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        ("-3", -3),
        ("1.2.3", "1.2.3"),
        ("yes", True),
        ("~", None),
        ("08", 8.0),
    ],
)
def test_scalars_are_read_as_kubernetes_reads_them(scalar: str, value: object) -> None:
    assert load(f"kind: PyTorchJob\nx: {scalar}")["x"] == value


@given(JSON)
def test_yaml_round_trip_changes_nothing(value: Any) -> None:
    manifest = {"kind": "PyTorchJob", "spec": value}
    quoted = yaml.safe_dump(manifest, default_style='"')  # PyYAML doesn't quote 1e3, which Kubernetes reads as a number
    assert load(quoted) == manifest == load(json.dumps(manifest))


def test_keys_are_converted_to_text() -> None:
    assert load("kind: PyTorchJob\n7: a\ntrue: b\n") == {"kind": "PyTorchJob", "7": "a", "true": "b"}


class Model:
    """A model like those of OpenAPI's generator: snake_case attributes and a map to the names in the API."""

    attribute_map = {"api_version": "apiVersion", "kind": "kind", "spec": "spec", "status": "status"}  # noqa: RUF012

    def __init__(self, **values: Any) -> None:
        self.api_version, self.kind, self.spec = values["api_version"], values["kind"], values["spec"]
        self.status = None

    def to_dict(self) -> dict[str, Any]:
        return {"api_version": self.api_version, "kind": self.kind, "spec": self.spec, "status": None}


class Plain:
    def to_dict(self) -> dict[str, Any]:
        return pytorchjob()


def test_objects_of_sdks_are_serialized() -> None:
    model = Model(api_version="kubeflow.org/v1", kind="PyTorchJob", spec=Model(api_version="x", kind="y", spec=[1]))
    inner = {"apiVersion": "x", "kind": "y", "spec": [1]}
    assert load(model) == {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": inner}
    assert load(Plain()) == pytorchjob()


def test_job_is_found_among_other_documents() -> None:
    text = f"# a comment\n---\nkind: ConfigMap\nmetadata: {{name: settings}}\n---\n{TEXT}---\n"
    assert load(text) == pytorchjob()
    job = the_job(load_documents(text))
    assert [other.content["kind"] for other in job.beside] == ["ConfigMap"]
    assert [text.partition(" is not")[0] for text in job.left_out] == ["ConfigMap settings"]
    assert job.line == 6


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", ["empty", "expected one MPIJob or PyTorchJob"]),
        ("a: [1\nb: 2", ["invalid YAML", "manifest:2", "'b: 2'"]),
        ("a: 1\nb: 2\na: 3\n", ["invalid YAML", "manifest:3", "duplicate key 'a'", "first in line 1"]),
        ("a:\n\tb: 1\n", ["invalid YAML", "manifest:2", r"'\tb: 1'", "replace the tab by spaces"]),
        ("a: x\n\tb: 1\n", ["manifest:2", "replace the tab by spaces"]),
        ("x: &x [*x]", ["Circular reference", "check the aliases of YAML"]),
        ("just words", ["not a mapping", "just words", ".yaml"]),
        ("- a\n- b\n", ["not a mapping", "list"]),
        ("missing/train.yaml", ["missing/train.yaml can't be read: No such file", "remedy"]),
        (f"{TEXT}---\n{TEXT}", ["2 training jobs", "PyTorchJob train (line 1)", "exactly one"]),
        ("kind: A\n---\nkind: B\n", ["no training jobs", "A (no name)", "B (no name)"]),
        ("a: .nan", ["can't be written as JSON", "$.a"]),
        ({"a": [{"b": 1}, {"b": {"c": b"x"}}]}, ["can't be written as JSON", "$.a[1].b.c", "bytes"]),
        ("? [1, 2]\n: x", ["manifest:1", "unhashable key"]),
        ("a: !!binary aGk=", ["can't be written as JSON"]),
        ("a: !custom 1", ["invalid YAML", "manifest:1"]),
        (42, ["int", "a dict, YAML text"]),
    ],
)
def test_invalid_sources_are_refused_with_place_and_remedy(source: object, words: list[str]) -> None:
    with pytest.raises(ManifestError) as e:
        load(source)
    assert [w for w in words if w not in str(e.value)] == [], str(e.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"kind: \xff")
    with pytest.raises(ManifestError, match="not UTF-8"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ManifestError, match="can't be read"):
        load(tmp_path / "folder.yaml")


def test_exponential_aliases_are_refused() -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    with pytest.raises(ManifestError, match="too large"):
        load(bomb)


def test_line_of_a_path_is_found() -> None:
    (document,) = load_documents("# first\nkind: PyTorchJob\nspec:\n  list:\n  - a: 1\n  - 'x/y': 2\n")
    assert document.line_of("$.kind") == 2
    assert document.line_of("$.spec.list[1]['x/y']") == 6
    assert document.line_of("$.spec.list[1].absent.deeper[3]") == 6
    assert document.line_of("$.nowhere") == 2


def test_errors_survive_pickling() -> None:
    import pickle

    error = ManifestError("m", where="w", found="f", expected="e", remedy="r")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "w: m; found f; expected e; remedy: r"
    assert again.remedy == "r"


def test_plain_refuses_values_that_are_not_json() -> None:
    with pytest.raises(ManifestError, match="found object <object"):
        plain({"a": [object()]})
