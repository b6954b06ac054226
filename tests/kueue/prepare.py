"""Copies recordings of Kueue to tests/kueue/recordings, without the changes that a replay doesn't need.

python -m tests.kueue.prepare FOLDER...
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from .recording import JOB_LABELS, kept

HERE = Path(__file__).parent / "recordings"


def copy(folder: Path) -> None:
    target = HERE / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for name in ("scenario.yaml", "setup.yaml"):
        shutil.copy(folder / name, target / name)
    read = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    changes = [change if kept(change) else _only_metadata(change) for change in read if kept(change) or _is_new(change)]
    lines = (json.dumps(change, separators=(",", ":"), ensure_ascii=False) for change in changes)
    (target / "events.jsonl").write_text("\n".join(lines) + "\n")
    requests = [json.loads(line) for line in (folder / "http.jsonl").read_text().splitlines()]
    written = [json.dumps(_short(r), separators=(",", ":")) for r in requests if r["request"]["method"] != "GET"]
    (target / "http.jsonl").write_text("\n".join(written) + "\n")


def _is_new(change: dict[str, Any]) -> bool:
    """Whether a pod is added or deleted."""
    return bool(change["watch"] == "pods" and change["type"] != "MODIFIED")


def _only_metadata(change: dict[str, Any]) -> dict[str, Any]:
    meta = change["object"]["metadata"]
    labels = {key: value for key, value in (meta.get("labels") or {}).items() if key in JOB_LABELS}
    few = {key: meta[key] for key in ("name", "uid", "resourceVersion")}
    return {**change, "object": {"metadata": {**few, "labels": labels}}}


def _short(record: dict[str, object]) -> dict[str, object]:
    """A request and the relevant part of its response: its status, the written version, or the rejection's reason."""
    body, request = record["body"], record["request"]
    assert isinstance(request, dict)
    about = body if isinstance(body, dict) else {}
    meta = {k: v for k, v in (about.get("metadata") or {}).items() if k in ("name", "resourceVersion", "uid")}
    message = {k: about[k] for k in ("message", "reason") if k in about}
    kept_request = {k: v for k, v in request.items() if k != "headers"}
    head = {k: record[k] for k in ("t", "name", "status")}
    return {**head, "request": kept_request, "body": {"metadata": meta, **message}}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        copy(Path(argument))
