"""A KVSP deployment of separate processes, and a front end that reads from it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvsp.blocks.container import Container
from kvsp.instance.engines.engine import Engine
from kvsp.instance.engines.samplers import SamplerState
from kvsp.instance.engines.toy import ToyEngine
from kvsp.names.identity import Scope, block_keys
from kvsp.names.uris import BlockId, block_path, compat_path
from kvsp.records.records import OutputToken, Sampler
from kvsp.records.release import FrontEnd
from tests.e2e.support import BIN, Process, eventually

JSON = "application/kvsp+json"
BLOCK_TOKENS = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def toml(value: Any) -> str:
    """A value as TOML; JSON's strings, numbers and arrays are TOML, too."""
    if isinstance(value, bool | str | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(toml(item) for item in value) + "]"


def ask(
    method: str,
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 20,
) -> tuple[int, Any]:
    """Status and JSON body of a request; octets are sent as they are."""
    fields = dict(headers or {})
    data = body
    if body is not None and not isinstance(body, bytes):
        data = json.dumps(body).encode()
        fields.setdefault("Content-Type", JSON)
    request = urllib.request.Request(url, data, fields, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        text, status = error.read(), error.code
    return status, json.loads(text) if text.startswith(b"{") else text


class Server:
    """One `kvsp-server --dev` process; it can be killed and started again on its port."""

    def __init__(
        self,
        folder: Path,
        name: str,
        roles: str,
        *,
        shared: bool = False,
        **tables: Mapping[str, Any],
    ) -> None:
        """A `shared` one serves several tests and is ended by `sharing`, not after each."""
        self.folder, self.name, self.roles, self.shared = folder, name, roles, shared
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}/kvsp/"
        self.data = folder / name
        self._config = folder / f"{name}.toml"
        lines = []
        for table, members in tables.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {toml(value)}" for key, value in members.items()]
        self._config.write_text("\n".join(lines) + "\n")
        self.starts = 0
        self.process: Process

    def begin(self, **options: Any) -> Server:
        """Start the process, without waiting for it."""
        self.starts += 1
        self.process = Process(
            self.folder,
            f"{self.name}-{self.starts}",
            BIN / "kvsp-server",
            *("--dev", "--roles", self.roles, "--listen", f"127.0.0.1:{self.port}"),
            *("--data-dir", self.data, "--config", self._config),
            **options,
        )
        if self.shared:
            Process.running.remove(self.process)
        return self

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.process.popen.wait()

    def ready(self) -> Server:
        self.process.wait_for(r"ready http://\S+ base=\S+")
        return self

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return ask(method, self.base + path, body, **options)

    def health(self, name: str) -> tuple[int, str]:
        """Status code and status of `healthz` or `readyz`."""
        status, answer = ask("GET", f"http://127.0.0.1:{self.port}/{name}")
        return status, answer["status"]

    def metric(self, name: str) -> float:
        """The value of a line of /metrics that starts with `name`."""
        _, text = ask("GET", f"http://127.0.0.1:{self.port}/metrics")
        for line in text.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


def start(*servers: Server) -> None:
    """Start several at once: most of a start is importing."""
    for server in servers:
        server.begin()
    for server in servers:
        server.ready()


@contextlib.contextmanager
def sharing(*servers: Server) -> Iterator[None]:
    """Servers that several tests use, ended with the module's last one."""
    try:
        yield
    finally:
        for server in servers:
            server.process.kill()


class Model:
    """The model of a deployment, the toy one by default, in the test's own process."""

    def __init__(self, folder: Path, engine: Engine | None = None) -> None:
        self.engine = engine or ToyEngine(block_tokens=BLOCK_TOKENS)
        self.descriptor = self.engine.descriptor
        self.scope = Scope.generate()
        folder.mkdir(exist_ok=True)
        self.scope_file = folder / "scope.json"
        self.scope.save(self.scope_file)

    def keys(self, tokens: Iterable[int]) -> list[bytes]:
        return block_keys(self.scope, self.descriptor, list(tokens))

    def block_id(self, key: bytes) -> BlockId:
        return BlockId(self.descriptor.compat_id, self.scope.scope_id, key)

    def containers(self, tokens: list[int]) -> list[bytes]:
        """The container of each complete block of a prompt."""
        context = self.engine.context()
        context.prefill(tokens)
        made = []
        for index in range(len(tokens) // self.descriptor.block_tokens):
            container = Container.build(self.descriptor, context.block(index).sections())
            made.append(b"".join(bytes(part) for part in container))
        return made

    def text(self, prompt: list[int], count: int, sampler: Sampler) -> list[int]:
        """What an undisturbed run gives."""
        context, state = self.engine.context(), SamplerState.of(sampler)
        context.prefill(prompt)
        text = []
        for _ in range(count):
            text.append(context.next_token(state))
            context.prefill(text[-1:])
        return text

    def store(
        self, index: Server, holder: Server, tokens: list[int], *, chained: bool = False
    ) -> list[bytes]:
        """Put the blocks of a prompt into a holder; their keys. When they are `chained` each
        names the one before it."""
        compat = compat_path(self.descriptor.compat_id)
        assert index.ask("PUT", compat, json.loads(self.descriptor.jcs))[0] in (200, 201)
        keys = self.keys(tokens)
        fields = {"Content-Type": "application/kvsp-block", "If-None-Match": "*"}
        for place, (key, container) in enumerate(zip(keys, self.containers(tokens), strict=True)):
            if chained and place:
                fields["Kvsp-Prior-Block"] = keys[place - 1].hex()
            status, _ = holder.ask("PUT", block_path(self.block_id(key)), container, headers=fields)
            assert status == 201
        return keys

    def lookup(self, index: Server, keys: list[bytes]) -> int:
        """How many leading keys the index matches."""
        body = {
            "scope_id": self.scope.scope_id.hex(),
            "compat_id": self.descriptor.compat_id.hex(),
            "block_keys": [key.hex() for key in keys],
        }
        status, answer = index.ask("POST", "lookup", body)
        assert status == 200, answer
        return answer["matched"]


class Controllers:
    """The controllers as a client has them: it asks whichever answers."""

    def __init__(self, *servers: Server) -> None:
        self.servers = servers

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, answer = 503, None
        for server in self.servers:
            try:
                status, answer = server.ask(method, path, body, timeout=1)
            except OSError:
                continue
            if status != 503:
                break
        return status, answer

    def leader(self, other_than: Server | None = None) -> Server:
        found: list[Server] = []

        def leads() -> bool:
            for server in self.servers:
                if server is not other_than and server.ask("GET", "instances")[0] == 200:
                    found.append(server)
            return bool(found)

        eventually(leads, "a controller that leads")
        return found[0]


class Reader:
    """A front end: asks the controller where its session is and reads from there."""

    def __init__(self, controller: Server | Controllers, session: str, count: int) -> None:
        self.front = FrontEnd(session)
        self.delivered: list[OutputToken] = []
        self.epochs: set[int] = set()
        self._controller, self._session, self._count = controller, session, count

    @property
    def text(self) -> list[int]:
        return [token.token for token in self.delivered]

    def read_until(self, count: int) -> None:
        """Read until `count` tokens were delivered."""
        eventually(lambda: self._read(count) or len(self.delivered) >= count, f"{count} tokens")

    def _read(self, count: int) -> None:
        _, where = self._controller.ask("GET", f"sessions/{self._session}")
        if not isinstance(where, dict) or not where.get("instance"):
            return
        # from a little before, as a front end that is not sure would
        start = max(0, self.front.next_index - 3)
        url = f"{where['instance']}sessions/{self._session}/tokens?from={start}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as lines:
            for line in lines:
                token = OutputToken.from_json(line)
                self.epochs.add(token.epoch)
                self.delivered += self.front.receive(token)
                if len(self.delivered) >= count:
                    return
