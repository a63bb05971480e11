"""A stand-in of MLflow's tracking server: the calls of its REST API that a run makes, held in memory.

mlflow.org/docs/latest/rest-api.html. Names and values are checked as the server does.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Run:
    experiment_id: str
    name: str
    status: str = "RUNNING"
    lifecycle_stage: str = "active"
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Steps and values by key."""


class MlflowServer(ThreadingHTTPServer):
    """`fault`: the status that every request gets instead of an answer. `hang`: none gets one, until it is set."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Run] = {}
        self.fault: int | None = None
        self.hang: threading.Event | None = None
        self.headers: list[dict[str, str]] = []
        self.num_requests = 0

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error_code": code, "message": message}


class Handler(BaseHTTPRequestHandler):
    server: MlflowServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self._answer(url.path, {name: values[0] for name, values in parse_qs(url.query).items()})

    def do_POST(self) -> None:
        self._answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, path: str, given: dict[str, Any]) -> None:
        self.server.num_requests += 1
        self.server.headers.append(dict(self.headers))
        if self.server.hang is not None:
            self.server.hang.wait()
        status = 200
        body: dict[str, Any] = {}
        call = path.rpartition("mlflow/")[2].replace("/", "_").replace("-", "_")
        try:
            if self.server.fault is not None:
                raise Refused(self.server.fault, "TEMPORARILY_UNAVAILABLE", "the database is away")
            if not hasattr(self, call):
                raise Refused(404, "ENDPOINT_NOT_FOUND", path)
            body = getattr(self, call)(given) or {}
        except Refused as error:
            status, body = error.status, error.body
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass

    def experiments_get_by_name(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["experiment_name"]
        if name not in self.server.experiments:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"no experiment {name}")
        return {"experiment": {"experiment_id": self.server.experiments[name], "name": name}}

    def experiments_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.server.experiments[given["name"]] = str(len(self.server.experiments) + 1)
        return {"experiment_id": self.server.experiments[given["name"]]}

    def runs_create(self, given: dict[str, Any]) -> dict[str, Any]:
        run_id = f"{len(self.server.runs):032x}"
        tags = {tag["key"]: tag["value"] for tag in given.get("tags", ())}
        self.server.runs[run_id] = Run(given["experiment_id"], given.get("run_name", ""), tags=tags)
        return self.runs_get({"run_id": run_id})

    def _run(self, given: dict[str, Any]) -> Run:
        if given["run_id"] not in self.server.runs:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"no run {given['run_id']}")
        return self.server.runs[given["run_id"]]

    def _active_run(self, given: dict[str, Any]) -> Run:
        run = self._run(given)
        if run.lifecycle_stage == "deleted":
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"The run {given['run_id']} must be in the 'active' state")
        return run

    def runs_get(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self._run(given)
        info = {"run_id": given["run_id"], "experiment_id": run.experiment_id, "run_name": run.name}
        info |= {"status": run.status, "lifecycle_stage": run.lifecycle_stage}
        data = {"params": _pairs(run.params), "tags": _pairs(run.tags)}
        return {"run": {"info": info, "data": data}}

    def runs_update(self, given: dict[str, Any]) -> dict[str, Any]:
        self._active_run(given).status = given["status"]
        return {"run_info": self.runs_get(given)["run"]["info"]}

    def runs_set_tag(self, given: dict[str, Any]) -> None:
        self._active_run(given).tags[given["key"]] = given["value"]

    def runs_log_batch(self, given: dict[str, Any]) -> None:
        run = self._active_run(given)
        metrics, params = given.get("metrics", ()), given.get("params", ())
        if len(metrics) > 1000 or len(params) > 100:
            raise Refused(400, "INVALID_PARAMETER_VALUE", "too many at once")
        for param in params:
            if run.params.get(param["key"], param["value"]) != param["value"]:
                raise Refused(400, "INVALID_PARAMETER_VALUE", f"{param['key']} was logged with another value")
            run.params[param["key"]] = param["value"]
        for metric in metrics:
            if re.fullmatch(r"[/\w.\- :]*", metric["key"], re.ASCII) is None:
                raise Refused(400, "INVALID_PARAMETER_VALUE", f"Invalid metric name {metric['key']}")
            run.metrics[metric["key"]].append((int(metric.get("step", 0)), float(metric["value"])))


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


@contextmanager
def mlflow_server(earlier: MlflowServer | None = None) -> Iterator[MlflowServer]:
    """Serve; `earlier`: at the address of one that has ended, with what it held."""
    with MlflowServer(0 if earlier is None else earlier.server_address[1]) as server:
        if earlier is not None:
            server.experiments, server.runs = earlier.experiments, earlier.runs
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            if server.hang is not None:
                server.hang.set()
            server.shutdown()
