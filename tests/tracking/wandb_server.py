"""A W&B server of this machine, just large enough for one run to go online, log, finish and resume."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """`rows` are the history rows that arrived, `known` the runs it has already, with their last step.

    `tags` are those of each run. `silent` makes it take requests and never answer, `unanswered` does so for
    single operations.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.known: dict[str, int] = {}
        self.tags: list[str] = []
        self.silent = False
        self.unanswered: set[str] = set()
        self.closing = threading.Event()
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.rows += [json.loads(line) for line in lines]
            run_id = path.split("/")[-2]
            for line in lines:
                self.known[run_id] = max(self.known.get(run_id, 0), json.loads(line)["_step"])
            return {}
        operation, variables = body.get("operationName", ""), body.get("variables", {})
        self.operations.append(operation)
        if operation == "UpsertBucket":
            self.tags = variables.get("tags") or self.tags
            return {"data": {"upsertBucket": {"bucket": self.bucket(variables["name"]), "inserted": True}}}
        if operation == "RunResumeStatus":
            run = self.bucket(variables["name"]) if variables["name"] in self.known else None
            model = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": run}
            return {"data": {"model": model}}
        if operation == "Viewer":
            return {"data": {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}}}
        return {"errors": [{"message": f"{operation} is not served here"}]}

    def bucket(self, run_id: str) -> dict[str, Any]:
        count = self.known.get(run_id, 0)
        tail = json.dumps([json.dumps({"_step": count, "_runtime": 1})]) if count else "[]"
        return {
            "id": run_id,
            "name": run_id,
            "displayName": run_id,
            "description": "",
            "config": "{}",
            "summaryMetrics": json.dumps({"_step": count}) if count else "{}",
            "sweepName": None,
            "tags": self.tags,
            "historyLineCount": count,
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": tail,
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',  # says that the run has begun
            "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
        }


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if server.silent or body.get("operationName") in server.unanswered:
                server.closing.wait(60)
                return
            self.reply(server.answer(self.path, body))

        def do_GET(self) -> None:
            self.reply({})

        def reply(self, value: dict[str, Any]) -> None:
            payload = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        listener.shutdown()
        thread.join()
        listener.server_close()
