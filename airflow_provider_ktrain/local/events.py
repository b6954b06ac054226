"""Events as controllers record them: one object per distinct message, with a count that grows."""

from __future__ import annotations

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.store import Obj, Store, now


class EventRecorder:
    """Records Events about objects, as client-go's recorder does, in the name of one component."""

    def __init__(self, store: Store, component: str) -> None:
        self._store = store
        self._component = component

    def event(self, obj: Obj, type_: str, reason: str, message: str, field_path: str = "") -> None:
        """Record an Event (`type_`: Normal or Warning) about `obj`, or count the same one up."""
        meta = obj["metadata"]
        namespace = meta.get("namespace") or "default"
        involved = {
            "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"], "apiVersion": obj["apiVersion"],
            "resourceVersion": meta.get("resourceVersion", ""),
            **({"namespace": meta["namespace"]} if meta.get("namespace") else {}),
            **({"fieldPath": field_path} if field_path else {}),
        }  # fmt: skip
        for known in self._store.list(r.EVENT, namespace):
            same = known["involvedObject"].get("uid") == meta["uid"] and known["type"] == type_
            if same and known["reason"] == reason and known["message"] == message:
                self._store.update(r.EVENT, {**known, "count": known.get("count", 1) + 1, "lastTimestamp": now()})
                return
        self._store.create(r.EVENT, {
            "metadata": {"namespace": namespace, "name": f"{meta['name']}.{self._store.version + 1:016x}"},
            "involvedObject": involved, "reason": reason, "message": message, "type": type_,
            "source": {"component": self._component}, "firstTimestamp": now(), "lastTimestamp": now(), "count": 1,
            "eventTime": None, "reportingComponent": self._component, "reportingInstance": "",
        })  # fmt: skip
