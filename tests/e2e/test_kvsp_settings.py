"""What settings lead to, in real processes: other engines, limits, what clients are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from kvsp.names.uris import block_path, compat_path
from tests.e2e.kvsp_support import Model, Server, ask, free_port, toml
from tests.e2e.support import BIN, Process, eventually
from tests.redis_server import redis_server
from tests.s3_server import BUCKET, CREDENTIALS, s3_server

TOKENS = [(5 * number + 3) % 256 for number in range(24)]
NEW_BLOCK = {"Content-Type": "application/kvsp-block", "If-None-Match": "*"}


def test_two_index_processes_share_a_redis_server_that_the_file_names(tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        table = {"url": url, "prefix": "shared", "threads": 3}
        first, second = (
            Server(tmp_path, name, "index", **{"index.redis": table}).begin()
            for name in ("first", "second")
        )
        for server in (first, second):
            server.ready()
        holder = Server(tmp_path, "holder", "holder", peers={"index": first.base}).begin().ready()
        model = Model(tmp_path / "model")
        keys = model.store(first, holder, TOKENS)
        eventually(lambda: model.lookup(second, keys) == len(keys), "the records, at the other one")
        first.kill()
        assert model.lookup(second, keys) == len(keys)
        assert not (second.data / "index.sqlite").exists()


def test_blocks_in_an_object_store_and_their_leases_outlive_the_holder(tmp_path: Path) -> None:
    index = Server(tmp_path, "index", "index").begin().ready()
    bucket = tmp_path / "bucket"
    holder = Server(
        tmp_path,
        "holder",
        "holder",
        peers={"index": index.base},
        holder={"host_mib": 8},
        **{"holder.objects": {"url": bucket.as_uri(), "mib": 1}},
    )
    holder.begin().ready()
    model = Model(tmp_path / "model")
    keys = model.store(index, holder, TOKENS)
    body = {
        "compat_id": model.descriptor.compat_id.hex(),
        "scope_id": model.scope.scope_id.hex(),
        "block_keys": [keys[0].hex()],
        "ttl_ms": 60_000,
    }
    status, grant = holder.ask("POST", "leases", body)
    assert status == 201
    assert len(list(bucket.rglob("*.kvb"))) == len(keys)
    holder.kill()
    holder.begin().ready()
    for key, octets in zip(keys, model.containers(TOKENS), strict=True):
        assert holder.ask("GET", block_path(model.block_id(key)))[1] == octets
    assert holder.ask("GET", f"leases/{grant['lease']}")[0] == 200
    assert holder.ask("DELETE", block_path(model.block_id(keys[0])))[0] == 409
    eventually(lambda: model.lookup(index, keys) == len(keys), "the records")


def test_two_holders_share_a_bucket_and_neither_takes_blocks_of_the_other_away(
    tmp_path: Path,
) -> None:
    with s3_server(tmp_path) as s3:
        credentials = tmp_path / "credentials.toml"
        credentials.touch(mode=0o600)
        credentials.write_text("".join(f"{k} = {toml(v)}\n" for k, v in CREDENTIALS.items()))
        objects = {
            "url": f"s3://{BUCKET}/blocks-of-us",
            "endpoint": s3.endpoint,
            "region": "us-east-1",
            "credentials_file": str(credentials),
            "request_s": 4.0,
            "look_s": 0.3,
        }
        index = Server(tmp_path, "index", "index").begin().ready()
        first, second = (
            Server(
                tmp_path, name, "holder", peers={"index": index.base}, **{"holder.objects": objects}
            ).begin()
            for name in ("first", "second")
        )
        for server in (first, second):
            server.ready()
        model = Model(tmp_path / "model")
        keys = model.store(index, first, TOKENS)
        paths = [block_path(model.block_id(key)) for key in keys]
        containers = model.containers(TOKENS)

        def served(server: Server) -> bool:
            return [server.ask("GET", path)[1] for path in paths] == containers

        eventually(lambda: served(second), "what the first one stored, at the second one")
        assert second.ask("PUT", paths[0], containers[0], headers=NEW_BLOCK)[0] == 412
        assert first.ask("DELETE", paths[0])[0] == 204
        assert first.ask("GET", paths[0])[0] == 404
        first.kill()
        eventually(lambda: served(second), "all blocks at the second one, after that")
        # a store that does not answer is 503 for whoever needs it, and comes back
        s3.stop()
        eventually(lambda: second.ask("GET", paths[0])[0] == 503, "503")
        eventually(lambda: second.health("readyz") == (200, "degraded"), "degraded")
        s3.go_on()
        eventually(lambda: second.ask("GET", paths[0])[1] == containers[0], "the block again")
        eventually(lambda: second.health("readyz") == (200, "ready"), "readiness")


def test_limits_of_the_file_are_the_ones_that_clients_are_held_to(tmp_path: Path) -> None:
    server = Server(
        tmp_path,
        "server",
        "index,holder",
        listen={"moqt": ["moqt://relay.example/"], "idle_s": 7},
        http={"json_octets": "4KiB", "header_octets": 2000, "requests_per_s": 50, "burst": 60},
        holder={"container_octets": 900, "lossy_transcoding": True},
        index={"block_keys": 5, "max_ttl_ms": 700, "targets": 1},
        **{"holder.leases": {"ttl_ms": 900, "request_keys": 2}},
    )
    server.begin().ready()
    model = Model(tmp_path / "model")
    host = f"http://127.0.0.1:{server.port}"
    assert ask("GET", f"{host}/.well-known/kvsp")[1]["moqt"] == ["moqt://relay.example/"]

    def asked(method: str, path: str, body: object = None, **fields: str) -> tuple[int, object]:
        status, problem = server.ask(method, path, body, headers=fields)
        return status, problem.get("limit") if isinstance(problem, dict) else None

    descriptor = json.loads(model.descriptor.jcs)
    assert asked("PUT", compat_path(model.descriptor.compat_id), descriptor)[0] == 201
    (octets, *_), (key, *_) = model.containers(TOKENS), model.keys(TOKENS)
    path = block_path(model.block_id(key))
    assert len(octets) > 900
    assert asked("PUT", path, octets, **NEW_BLOCK) == (413, 900)
    query = {
        "scope_id": model.scope.scope_id.hex(),
        "compat_id": model.descriptor.compat_id.hex(),
        "block_keys": [bytes([number] * 32).hex() for number in range(6)],
    }
    assert asked("POST", "lookup", query) == (413, 5)
    assert asked("POST", "leases", query | {"ttl_ms": 1}) == (413, 2)
    assert asked("POST", "lookup", query | {"block_keys": ["0" * 64] * 70}) == (413, 4096)
    assert asked("GET", path, **{"X-Long": "x" * 4000})[0] == 431
    statuses = [asked("GET", path)[0] for _ in range(80)]
    assert 429 in statuses


def test_a_holder_that_may_hold_nothing_of_a_claimed_size_says_the_limit_it_was_given(
    tmp_path: Path,
) -> None:
    """By the environment, which goes before the file."""
    server = Server(tmp_path, "server", "index,holder", holder={"container_octets": "1GiB"})
    server.begin(env={**os.environ, "KVSP_HOLDER_CONTAINER_OCTETS": "800"}).ready()
    model = Model(tmp_path / "model")
    compat = compat_path(model.descriptor.compat_id)
    assert server.ask("PUT", compat, json.loads(model.descriptor.jcs))[0] == 201
    path = block_path(model.block_id(model.keys(TOKENS)[0]))
    status, problem = server.ask("PUT", path, model.containers(TOKENS)[0], headers=NEW_BLOCK)
    assert (status, problem["limit"]) == (413, 800)


def test_a_configuration_is_shown_checked_and_started_from_where_it_stands(tmp_path: Path) -> None:
    """A relative path is the file's, whatever folder the program was started in."""
    (tmp_path / "etc").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    config = tmp_path / "etc" / "kvsp.toml"
    port = free_port()
    config.write_text(
        f'roles = ["index", "holder"]\ndev = true\ndata_dir = "../data"\n'
        f'[listen]\naddress = "127.0.0.1:{port}"\n[holder]\ndisk_mib = 4\n'
    )
    command = [str(BIN / "kvsp-server"), "--config", str(config)]
    how = {"cwd": elsewhere, "capture_output": True, "text": True, "check": False}
    shown = subprocess.run([*command, "--print-config"], **how)
    assert shown.returncode == 0 and f"disk_mib = 4  # {config}" in shown.stdout
    (tmp_path / "shown.toml").write_text(shown.stdout)
    checked = subprocess.run([*command, "--check-config"], **how)
    assert (checked.returncode, checked.stderr) == (0, "kvsp-server: the settings are right\n")
    assert not (tmp_path / "data").exists()
    # what was shown is a configuration, too
    command[2] = str(tmp_path / "shown.toml")
    server = Process(tmp_path, "server", *command, cwd=elsewhere)
    server.wait_for(r"ready http://\S+")
    assert (tmp_path / "data" / "index.sqlite").exists()
    # while it runs a check is none the less possible, and says what is wrong
    config.write_text(config.read_text() + 'uploads_per_clients = 1\n[peers]\ncafile = "no.pem"\n')
    wrong = subprocess.run([*command[:2], str(config), "--check-config"], **how)
    assert wrong.returncode == 2
    assert "holder.uploads_per_clients is no setting; did you mean holder.uploads_per_client?" in (
        wrong.stderr
    )
    server.signal(signal.SIGTERM)
    server.finish(0)


def test_a_start_that_fails_in_the_end_leaves_nothing_behind(tmp_path: Path) -> None:
    first = Server(tmp_path, "first", "index").begin().ready()
    second = Server(tmp_path, "second", "index,holder,controller")
    second.port = first.port
    second.begin()
    assert second.process.popen.wait(60) == 1
    assert "choose another port" in second.process.stderr
    assert not second.data.exists()
