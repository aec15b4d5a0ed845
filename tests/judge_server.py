"""A local OpenAI-compatible server for tests, which replies, or misbehaves, as the test specifies.

with JudgeServer(say("Score: 7")) as server:  # server.url; also .requests and .max_concurrent
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[BaseHTTPRequestHandler, Any], None]  # sends a reply, given the handler and the request's JSON
MODELS = {"object": "list", "data": [{"id": "toy-judge"}, {"id": "other"}]}


def send(body: object, status: int = 200, **headers: str) -> Reply:
    """Reply with a body: bytes are sent as they are, anything else as JSON."""

    def reply(handler: BaseHTTPRequestHandler, _: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in ({"Content-Length": len(data)} | headers).items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def completion(text: object, finish_reason: str = "stop") -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}


def say(text: object, finish_reason: str = "stop", wait_s: float = 0.0) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, request: Any) -> None:
        time.sleep(wait_s)
        send(completion(text, finish_reason))(handler, request)

    return reply


def prompt_text(request: dict) -> str:
    """Return the text of a request."""
    content = request["messages"][0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def echo(cut: Callable[[str], str]) -> Reply:
    """Reply with `cut` of the prompt's text."""
    return lambda handler, request: send(completion(cut(prompt_text(request))))(handler, request)


def raw(*pieces: bytes, interval_s: float = 0.0, forever: bool = False) -> Reply:
    """Reply with these bytes, including the status line, one piece after another; then close the connection."""

    def reply(handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.close_connection = True
        remaining = list(pieces)
        while remaining and not handler.server.stopping.is_set():
            handler.wfile.write(remaining[0] if forever and len(remaining) == 1 else remaining.pop(0))
            handler.wfile.flush()
            time.sleep(interval_s)

    return reply


def hang(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.close_connection = True
    handler.server.stopping.wait(20)


class JudgeServer(ThreadingHTTPServer):
    """A server that gives its replies in order and then repeats the last one. `models` replies to GET requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *replies: Reply, models: Reply | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = replies
        self.models = models or send(MODELS)
        self.requests: list[dict] = []  # path, headers, json, time
        self.lock = threading.Lock()
        self.concurrent = 0
        self.max_concurrent = 0
        self.stopping = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def calls(self) -> int:
        return sum("chat" in request["path"] for request in self.requests)

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore errors: in many tests the client disconnects."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append({"path": self.path, "headers": dict(self.headers), "json": None})
        self.server.models(self, None)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            request = {"path": self.path, "headers": dict(self.headers), "json": body, "time": time.monotonic()}
            server.requests.append(request)
            reply = server.replies[min(server.calls, len(server.replies)) - 1]
            server.concurrent += 1
            server.max_concurrent = max(server.max_concurrent, server.concurrent)
        try:
            reply(self, body)
        finally:
            with server.lock:
                server.concurrent -= 1
