"""What is in the checkpoint directory before a retry, as far as the worker can read it."""

from __future__ import annotations

import threading

from airflow_provider_ktrain.core.checkpoint_files import describe_files, is_url, without_connection

PATIENCE = 10.0  #: seconds from the start of the listing until its result is given up


class CheckpointListing:
    """Lists a directory in a thread of its own: a slow or broken storage neither delays nor fails the training.

    :param directory: a path in the pods, or a URL for Airflow's ObjectStoragePath. The URL may contain a connection.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._found = ""
        self._thread = threading.Thread(target=self._list, daemon=True, name="ktrain-checkpoints")
        if is_url(directory):
            self._thread.start()

    def describe(self, patience: float = PATIENCE) -> str:
        """One line for the log.

        :param patience: how long to wait for the listing, in seconds. Default: 10.
        """
        shown = without_connection(self._directory)
        if not is_url(self._directory):
            return f"Checkpoints: {shown} is a path in the pods. The worker can't list it."
        self._thread.join(patience)
        return f"Checkpoints: {shown} {self._found or f'was not listed within {patience:.0f} s'}."

    def _list(self) -> None:
        """Only the type of an error is logged: its message may contain a URL with a signature."""
        try:
            from airflow.sdk import ObjectStoragePath

            path = ObjectStoragePath(self._directory)
            self._found = describe_files(path.fs.find(path.path, detail=True), path.path)
        except FileNotFoundError:
            self._found = "has no files"
        except ImportError:
            scheme = self._directory.partition("://")[0]
            self._found = f"can't be listed: the worker lacks the library that Airflow needs for {scheme}://"
        except BaseException as e:
            self._found = f"can't be listed by the worker ({type(e).__name__})"
