"""The application behind the training page: its routes, their rights and their headers.

Airflow doesn't authenticate the requests of a plugin's application. Every route here depends on the user, except for
the style sheet and the scripts. Everything that is shown is data: templates escape it, and the Content-Security-Policy
allows no script but our own.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse
from jinja2 import Environment, PackageLoader
from starlette.exceptions import HTTPException as StarletteHTTPException

from airflow_provider_ktrain import compat, compat_server
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.links.training import PREFIX, page_query
from airflow_provider_ktrain.plugin import training_table, views
from airflow_provider_ktrain.plugin.trainings import CATEGORIES, STATES, Filters, Trainings

STATIC = Path(__file__).parent / "static"
FILES = {
    "theme.js": "text/javascript", "charts.js": "text/javascript", "page.js": "text/javascript", "page.css": "text/css",
    "table.js": "text/javascript", "uPlot.iife.min.js": "text/javascript", "uPlot.min.css": "text/css",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: Status code -> title and text of the page that a browser shows instead of Airflow's JSON.
ERRORS = {
    401: ("You are not logged in", "This page is shown to users of Airflow who may read the DAG."),
    403: (
        "You don't have access to this training",
        "It needs the right to read the DAG's task instances and XComs. Ask an administrator of this Airflow.",
    ),
    404: ("No such training", "Airflow has no such task instance, or none before it. Its run may have been deleted."),
    422: ("Incomplete address", "The address of this page names no training, or not two to ten. Use Airflow's links."),
}
User = Annotated[Any, Depends(compat_server.user_dependency())]


def task_key(
    dag_id: Annotated[str, Query(max_length=250)],
    run_id: Annotated[str, Query(max_length=250)],
    task_id: Annotated[str, Query(max_length=250)],
    map_index: Annotated[str, Query(max_length=20)] = "-1",
) -> TaskInstanceId:
    """The task instance of a request. Airflow leaves `{MAP_INDEX}` as it is for tasks that aren't mapped."""
    index = int(map_index) if re.fullmatch(r"-?[0-9]{1,9}", map_index) else -1
    return TaskInstanceId(dag_id, run_id, task_id, index)


Key = Annotated[TaskInstanceId, Depends(task_key)]
Wanted = Annotated[Filters, Depends(Filters)]
Compared = Annotated[list[str], Query(max_length=10)]
COMPARABLE = range(2, 11)  #: How many trainings can be compared.


def key_of(query: str) -> TaskInstanceId | None:
    """The task instance of `links.training.page_query`; None if it isn't one."""
    given = dict(parse_qsl(query))
    try:
        return task_key(given["dag_id"], given["run_id"], given["task_id"], given.get("map_index", "-1"))
    except KeyError:
        return None


def _login(request: Request, code: int) -> str:
    """The address of Airflow's login, which leads back to the page; empty if a login doesn't help."""
    base, name = compat.base_path(), request.url.path.rpartition(f"{PREFIX}/")[2].lstrip("/")
    back = urlencode({"next": f"{base}{PREFIX}/{name}?{request.url.query}"})
    return f"{base}/api/v2/auth/login?{back}" if code == 401 else ""


def build() -> FastAPI:
    """The application, for mounting below PREFIX."""
    app = FastAPI(title="ktrain", openapi_url=None, docs_url=None, redoc_url=None)
    templates = Environment(
        loader=PackageLoader("airflow_provider_ktrain.plugin"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.globals["root"] = compat.base_path() + PREFIX
    templates.globals["airflow"] = compat.base_path()
    rights = compat_server.rights_dependencies()
    trainings = Trainings()

    def page(name: str, **values: Any) -> HTMLResponse:
        return HTMLResponse(templates.get_template(name).render(**values), headers=HEADERS)

    def update(request: Request, name: str, data: dict[str, Any], view: SimpleNamespace) -> Response:
        """What the script polls: HTML and data, or 304 if nothing has changed."""
        tag = f'"{hashlib.sha256(repr(view.data).encode(errors="replace")).hexdigest()[:32]}"'
        headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        html = templates.get_template(name).render(view=view)
        return Response(json.dumps({"html": html, **data}), media_type="application/json", headers=headers)

    def view_of(key: TaskInstanceId, user: Any) -> SimpleNamespace:
        record = compat_server.find_task(key)
        if record is None:
            raise HTTPException(404, f"no task instance {key.task_id} in the run {key.run_id} of {key.dag_id}")
        status = compat_server.read_statuses([key]).get(key)
        with_logs = compat_server.may_read(user, key.dag_id, "TASK_LOGS")
        return views.training_view(record, status, compat_server.read_tries(key), with_logs=with_logs, now=time.time())

    def error(request: Request, failure: Exception) -> Response:
        """A page for people, or JSON for the script."""
        code = failure.status_code if isinstance(failure, StarletteHTTPException) else 422
        if code not in ERRORS or request.url.path.endswith("/update") or "/static/" in request.url.path:
            return JSONResponse({"detail": getattr(failure, "detail", "invalid query")}, code, headers=HEADERS)
        title, text = ERRORS[code]
        html = templates.get_template("error.html").render(title=title, text=text, login=_login(request, code))
        return HTMLResponse(html, code, headers=HEADERS)

    app.add_exception_handler(StarletteHTTPException, error)
    app.add_exception_handler(RequestValidationError, error)

    @app.get("/training", dependencies=rights)
    def training(key: Key, user: User) -> HTMLResponse:
        """The page of one task instance."""
        return page("training.html", view=view_of(key, user))

    @app.get("/training/update", dependencies=rights)
    def training_update(request: Request, key: Key, user: User) -> Response:
        """The part of the page that changes."""
        view = view_of(key, user)
        return update(
            request,
            "training_body.html",
            {"series": view.series, "labels": view.labels, "marks": True, "active": view.active},
            view,
        )

    @app.get("/trainings")
    def trainings_page(user: User, filters: Wanted) -> HTMLResponse:
        """The table of trainings of DAGs that the user may read."""
        choices = {"dags": trainings.dag_ids(user), "states": list(STATES), "categories": CATEGORIES}
        return page("trainings.html", view=trainings.view(user, filters, time.time()), **choices)

    @app.get("/trainings/update")
    def trainings_update(request: Request, user: User, filters: Wanted) -> Response:
        """The rows of the table."""
        view = trainings.view(user, filters, time.time())
        return update(request, "trainings_body.html", {"active": True}, view)

    def compared(user: Any, trainings: list[str]) -> SimpleNamespace:
        keys = [key for key in map(key_of, trainings) if key is not None]
        if len(keys) != len(trainings) or len(keys) not in COMPARABLE:
            raise HTTPException(422, "two to ten trainings can be compared")
        rights = compat_server.rights(user, {key.dag_id for key in keys})
        if any(key.dag_id not in rights for key in keys):
            raise HTTPException(403, "one of the trainings is of a DAG that you may not read")
        found, statuses = compat_server.find_trainings(keys), compat_server.read_statuses(keys)
        if missing := [key for key in keys if key not in found]:
            raise HTTPException(404, f"no task instance {missing[0]}")
        listed = [(found[key], statuses.get(key), rights[key.dag_id]) for key in keys]
        return training_table.comparison(listed, time.time())

    @app.get("/compare")
    def compare(request: Request, user: User, training: Compared) -> HTMLResponse:
        """Trainings beside each other."""
        return page("compare.html", view=compared(user, training), query=request.url.query)

    @app.get("/compare/update")
    def compare_update(request: Request, user: User, training: Compared) -> Response:
        """Their curves and results."""
        view = compared(user, training)
        data = {"series": view.series, "labels": view.labels, "active": view.active}
        return update(request, "compare_body.html", data, view)

    @app.get("/compare/before", dependencies=rights)
    def compare_before(key: Key) -> RedirectResponse:
        """The comparison of a training with the one before of the same task and map index."""
        this = compat_server.find_trainings([key]).get(key)
        selection = compat_server.Selection(frozenset({key.dag_id}), task=key)
        before = this and compat_server.trainings(selection, this.position, 1)
        if not before:
            raise HTTPException(404, "no training before this one")
        both = urlencode([("training", page_query(one)) for one in (before[0].record.key, key)])
        return RedirectResponse(f"{compat.base_path()}{PREFIX}/compare?{both}", headers=HEADERS)

    @app.get("/static/{name}")
    def static(name: str) -> FileResponse:
        """The style sheets and scripts, which are public."""
        if name not in FILES:
            raise HTTPException(404)
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "max-age=3600"}
        return FileResponse(STATIC / name, media_type=FILES[name], headers=headers)

    return app
