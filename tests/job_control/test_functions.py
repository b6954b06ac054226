"""The decorators of functions: which functions they accept, also if they are imported under another name."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

PARTS = """
import functools
from airflow.sdk import DAG, setup, task
from airflow.sdk import task as t
import airflow.sdk
from airflow_provider_ktrain.decorators import pytorchjob
from airflow_provider_ktrain.decorators.pytorchjob import pytorchjob_task, pytorchjob_task as run

small = task.pytorchjob(image="x")
partly = functools.partial(t.pytorchjob, image="x")

def configured(**options):
    return task.pytorchjob(image="x", **options)

def record(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def bare(function):
    def wrapper(*args):
        return function(*args)
    return wrapper

def register(function):
    return function
"""
FUNCTION = """    def train(a):
        text = '''
# not a comment
'''
        return f"{a}{text}"  # a comment
"""
NUMBERS = itertools.count()


def load(folder: Path, body: str) -> ModuleType:
    """A separate module that contains `body`, loaded as Airflow loads a DAG file."""
    path = folder / f"functions_{next(NUMBERS)}.py"
    path.write_text(PARTS + body)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "decorators",
    [
        '@task.pytorchjob(image="x")',
        '@t.pytorchjob(\n        image="x",\n    )',
        '@airflow.sdk.task.pytorchjob(image="x")',
        '@pytorchjob_task(image="x")',
        '@run(image="x")',
        '@pytorchjob.pytorchjob_task(image="x")',
        "@small",
        "@partly(gpus=1)",
        "@configured(gpus=1)",
        '@task.mpijob(image="x", workers=1)',
        "@task.trainjob",
        '@setup\n    @task.pytorchjob(image="x")',
        '@task.run_if(lambda context: True)\n    @t.pytorchjob(image="x")',
    ],
)
def test_source_is_shipped_without_decorators(tmp_path: Path, decorators: str) -> None:
    module = load(tmp_path, f"with DAG('d') as dag:\n    {decorators}\n{FUNCTION}    train(1)\n")
    assert module.dag.get_task("train").get_python_source() == f"if True:\n{FUNCTION}"


@pytest.mark.parametrize(
    "ours", ['task.mpijob(image="x")', 'task.pytorchjob(image="x")', "small", 'run(image="x")', "configured()"]
)
@pytest.mark.parametrize("below", ["record", "task.pytorchjob(image='y')", "task.mpijob(image='y')"])
def test_decorators_between_task_and_function_are_refused(tmp_path: Path, ours: str, below: str) -> None:
    with pytest.raises(ValueError, match=r"^@task.\w+: .*decorate a function inside"):
        load(tmp_path, f"with DAG('d'):\n    @{ours}\n    @{below}\n{FUNCTION}")


def test_refused_decorators_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train has other decorators below it: @register, @register"):
        load(tmp_path, f"with DAG('d'):\n    @task.pytorchjob(image='x')\n    @register\n    @register\n{FUNCTION}")


def test_wrapper_that_hides_the_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrapper uses 'function', which is defined outside of it"):
        load(tmp_path, f"with DAG('d'):\n    @task.pytorchjob(image='x')\n    @bare\n{FUNCTION}    train(1)\n")


def test_trainjob_uses_the_image_of_its_runtime(tmp_path: Path) -> None:
    load(tmp_path, f"with DAG('d'):\n    @task.trainjob\n{FUNCTION}    train(1)\n")


def test_mapped_function_is_checked_when_the_dag_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="@record"):
        load(tmp_path, f"with DAG('d'):\n    @small\n    @record\n{FUNCTION}    train.expand(a=[1, 2])\n")


def test_function_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the source of train can't be read"):
        load(tmp_path, 'exec("@small\\ndef train(): return 1")')


def test_source_of_another_function_is_refused(tmp_path: Path) -> None:
    """Python 3.13 returns the first lines of the file for a function that `exec` has made."""
    other = "def other(): return 2\nother.__code__ = other.__code__.replace(co_name='train')\nsmall(other)"
    with pytest.raises(ValueError, match="the source of other can't be read: define it in a file"):
        load(tmp_path, other)
