"""Binds each PersistentVolumeClaim to a directory of the state folder, as a provisioner of local volumes does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from ktrain_embedded.controllers.common import is_terminating
from ktrain_embedded.controllers.runtime import Clock, Controller, Key, itself
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store, at

STORAGE_CLASS = "ktrain"  # of claims that don't name one. There are no StorageClasses: any name is accepted


class ClaimController(Controller[Key]):
    """Creates a directory and a PersistentVolume for each claim, and removes both when the claim is deleted.

    The path of the directory consists of namespace and name, so a claim finds its data again after a restart.

    :param directory: contains the directories of all volumes.
    """

    def __init__(self, store: Store, directory: Path, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._directory = directory
        self.watch(r.CLAIM, itself)

    def reconcile(self, key: Key) -> float | None:
        """Bind the claim, or remove the volumes of a claim that is gone."""
        claim = self.store.find(r.CLAIM, *key)
        for volume in self.store.list(r.VOLUME):
            ref = volume["spec"]["claimRef"]
            if (ref["namespace"], ref["name"]) == key and (claim is None or ref["uid"] != claim["metadata"]["uid"]):
                self.store.delete(r.VOLUME, None, volume["metadata"]["name"])
                shutil.rmtree(volume["spec"]["hostPath"]["path"], ignore_errors=True)
        if claim is not None and not is_terminating(claim) and at(claim, "status.phase") != "Bound":
            self._bind(claim)
        return None

    def _bind(self, claim: Obj) -> None:
        meta, spec = claim["metadata"], claim["spec"]
        name = f"pvc-{meta['uid']}"
        path = self._directory / meta["namespace"] / meta["name"]
        path.mkdir(parents=True, exist_ok=True)
        capacity = {"storage": spec["resources"]["requests"]["storage"]}
        ref = {
            "kind": "PersistentVolumeClaim",
            "apiVersion": "v1",
            **{k: meta[k] for k in ("namespace", "name", "uid")},
        }
        common = {"accessModes": spec["accessModes"], "storageClassName": spec.get("storageClassName") or STORAGE_CLASS}
        if self.store.find(r.VOLUME, None, name) is None:
            made = {
                **common, "capacity": capacity, "claimRef": ref, "hostPath": {"path": str(path)},
                "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Filesystem",
            }  # fmt: skip
            volume = self.store.create(r.VOLUME, {"metadata": {"name": name}, "spec": made})
            self.store.update_status(r.VOLUME, volume, {"phase": "Bound"})
        bound = self.store.update(r.CLAIM, {**claim, "spec": {**spec, **common, "volumeName": name}})
        status = {"phase": "Bound", "accessModes": spec["accessModes"], "capacity": capacity}
        self.store.update_status(r.CLAIM, bound, status)
