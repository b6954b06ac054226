"""What is in the checkpoint directory before a retry, as far as the worker can read it."""

from __future__ import annotations

import threading
import time
from typing import Any

from airflow_provider_ktrain.core.manifest.job_request import without_connection
from airflow_provider_ktrain.core.reporting.checkpoint_files import describe_files, is_url

PATIENCE = 10.0  #: Seconds from the start of the listing until it is given up.
MAX_FILES = 10_000  #: How many files a listing that reads one directory after the other may find before it ends.


class CheckpointListing:
    """Lists a directory in a thread of its own: a slow or broken storage neither delays nor fails the training.

    :param directory: a path in the pods, or a URL for Airflow's ObjectStoragePath. The URL may contain a connection.
    :param patience: seconds from now until the listing is given up. Default: 10.
    """

    def __init__(self, directory: str, patience: float = PATIENCE) -> None:
        self._directory = directory
        self._patience, self._until = patience, time.monotonic() + patience
        self._found = ""
        self._thread = threading.Thread(target=self._list, daemon=True, name="ktrain-checkpoints")
        if is_url(directory):
            self._thread.start()

    def describe(self) -> str:
        """One line for the log. This waits for the listing, at most until its time is over."""
        directory = without_connection(self._directory)
        if not is_url(self._directory):
            return f"Checkpoints: {directory} is a path in the pods. The worker can't list it."
        self._thread.join(max(self._until - time.monotonic(), 0))
        return f"Checkpoints: {directory} {self._found or f'was not listed within {self._patience:.0f} s'}."

    def _list(self) -> None:
        """Only the type of an error is logged: its message may contain a URL with a signature."""
        try:
            from airflow.sdk import ObjectStoragePath

            path = ObjectStoragePath(self._directory)
            self._found = self._listed(path.fs, path.path)
        except FileNotFoundError:
            self._found = "has no files"
        except TimeoutError:
            self._found = ""
        except ImportError:
            scheme = self._directory.partition("://")[0]
            self._found = f"can't be listed: the worker lacks the library that Airflow needs for {scheme}://"
        except BaseException as e:
            self._found = f"can't be listed by the worker ({type(e).__name__})"

    def _listed(self, storage: Any, path: str) -> str:
        """The description of the files.

        Asynchronous file systems, as those of S3, Google Cloud Storage and Azure, list all levels at once, and cancel
        the listing at its timeout. `find` of the others walks through the directories and hides errors.

        :raises TimeoutError: the time doesn't suffice.
        """
        if storage.async_impl:
            left = max(self._until - time.monotonic(), 0.001)  # fsspec waits without limit if it is 0
            return describe_files(storage.find(path, detail=True, timeout=left), path)
        files: dict[str, Any] = {}
        for _, _, found in storage.walk(path, detail=True, on_error="raise"):
            files |= {details["name"]: details for details in found.values()}
            if time.monotonic() > self._until:
                raise TimeoutError
            if len(files) > MAX_FILES:
                return f"has more than {MAX_FILES:,} files"
        return describe_files(files, path)
