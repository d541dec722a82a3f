"""KVCache over MoQT with the programs as a user starts them, through a relay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.support import BIN, Cache, Process, Relay, readable, relay

PROMPT = b"Once upon a time\n"


def started(hub: Relay, program: str, cache: Cache, prompt: bytes, name: str, *options) -> Process:
    file = hub.directory / f"{name}.prompt"
    file.write_bytes(prompt)
    common = ("--profile", "kvcache", hub.url, "--cafile", hub.cafile, "--compat", cache.compat)
    command = (BIN / program, *common, "--prompt", file, "--group-tokens", "8", *options)
    return Process(hub.directory, name, *command)


def publish(hub: Relay, cache: Cache, *options, prompt=PROMPT, name="publish") -> Process:
    return started(hub, "kvcs-publish", cache, prompt, name, "--kv", cache.kv, *options)


def subscribe(hub: Relay, cache: Cache, *options, prompt=PROMPT, name="subscribe") -> Process:
    out = hub.directory / f"{name}.safetensors"
    return started(hub, "kvcs-subscribe", cache, prompt, name, "--out", out, "--json", *options)


def test_the_demonstration_of_both_profiles_holds_what_it_says(tmp_path: Path) -> None:
    demo = Process(tmp_path, "demo", sys.executable, "-m", "tools.demo_profiles", "--quick")
    demo.finish(0, 120)
    assert "octet for octet" in demo.stdout and "600 Objects" in demo.stdout
    assert "kvcache  <|im_start|>system You answer questions" in demo.stdout


def test_a_cache_is_retrieved_live_and_after_its_publisher_was_killed(
    cache: Cache, tmp_path: Path
) -> None:
    with relay(tmp_path) as hub:
        publisher = publish(hub, cache, "--live-delay", "150")
        publisher.wait_for("prompt in clear")
        live = subscribe(hub, cache, prompt=PROMPT + b"there was", name="live").finish(0).json()
        assert live["tokens"] == len(cache.tokens) and not live["whole_prompt"]
        assert live["first_chunk_seconds"] < live["seconds"]
        cache.check(tmp_path / "live.safetensors")
        publisher.kill()
        late = subscribe(hub, cache, name="late").finish(0).json()
        assert late["whole_prompt"] and late["octets"] == live["octets"]
        cache.check(tmp_path / "late.safetensors")


@pytest.mark.parametrize(
    ("options", "prompt", "code", "said"),
    [
        ((), b"Another", 3, "nothing is published as FP16"),
        (("--compression", "FP4"), PROMPT, 3, "nothing is published as FP4"),
        (("--compression", "AC (5x)"), PROMPT, 2, "arithmetic coding"),
        (("--max-tokens", "31"), PROMPT, 5, "more than 31 tokens"),
        (("--group-tokens", "4"), PROMPT, 5, "not one of a chunk of 4"),
        (("--timeout", "0.8"), b"", 2, "the prompt is empty"),
    ],
)
def test_a_failure_is_one_sentence_and_an_exit_code(
    cache: Cache, tmp_path: Path, options, prompt, code, said
) -> None:
    with relay(tmp_path) as hub:
        publish(hub, cache).wait_for("publishing")
        process = subscribe(hub, cache, *options, prompt=prompt).finish(code)
        assert said in readable(process, logged="--max-tokens" in options)  # limits are logged


def test_rights_are_given_by_model(cache: Cache, tmp_path: Path) -> None:
    made = {"writer": ["--model", "synthetic"], "reader": ["--model", "synthetic", "--read-only"]}
    made |= {"other": ["--model", "another"], "scope": ["--scope-key-file", cache.scope]}
    principals = tmp_path / "principals.json"
    for name, options in made.items():
        command = (BIN / "kvcs-keygen", "token", tmp_path / name, "--principals", principals)
        Process(tmp_path, f"keygen-{name}", *command, *options).finish(0)

    def shown(name: str) -> tuple[str, Path]:
        return "--token-file", tmp_path / name

    with relay(tmp_path, "--auth", principals) as hub:
        publish(hub, cache, *shown("writer")).wait_for("publishing")
        subscribe(hub, cache, *shown("reader")).finish(0)
        for name in ("reader", "other", "scope"):
            publish(hub, cache, *shown(name), name=f"publish-{name}").finish(4)
        for name in ("other", "scope"):
            subscribe(hub, cache, *shown(name), name=f"subscribe-{name}").finish(4)


def test_the_help_says_what_the_profile_shows_and_does_not_check(tmp_path: Path) -> None:
    def help_of(*command: object) -> str:
        process = Process(tmp_path, "help", *command, "--help").finish(0)
        return " ".join(process.stdout.replace("│", " ").split())

    for program in ("kvcs-publish", "kvcs-subscribe"):
        text = help_of(BIN / program, "--profile", "kvcache")
        assert "prompt and model stand in the names, in clear" in text
        assert "nothing of what comes is checked but its length" in text
        assert "--profile kvcache --help" in help_of(BIN / program)
