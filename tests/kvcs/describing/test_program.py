"""`kvcs-describe`."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from kvcs.describing.program import app
from kvsp.blocks.kv_files import load_descriptor
from kvsp.cli.common import ExitCode


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "rope_theta": 1e4,
        "dtype": "float16",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_bytes(b"{}")
    return model


def test_what_it_writes_is_a_descriptor_that_can_be_used(folder, tmp_path):
    out = tmp_path / "compat.json"
    done = CliRunner().invoke(app, [str(folder), "--out", str(out), "--block-tokens", "32"])
    assert (done.exit_code, done.output) == (ExitCode.DONE, "")
    descriptor = load_descriptor(out)
    assert (descriptor.model, descriptor.layers, descriptor.block_tokens) == ("model", 3, 32)
    shown = CliRunner().invoke(app, [str(folder), "--block-tokens", "32", "--no-keep"])
    assert shown.output == out.read_text()


def test_a_model_that_it_refuses_is_a_sentence(folder, capfd):
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 128}
    (folder / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, [str(folder)])
    assert done.exit_code == ExitCode.USAGE
    assert "slides over 128 tokens" in done.output + capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_said(folder, tmp_path, capfd):
    out = tmp_path / "nowhere" / "compat.json"
    done = CliRunner().invoke(app, [str(folder), "--out", str(out)])
    assert done.exit_code == ExitCode.FAILED
    assert str(out) in done.output + capfd.readouterr().err


def test_what_is_no_regular_file_is_not_replaced(folder, tmp_path, capfd):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = CliRunner().invoke(app, [str(folder), "--out", str(pipe)])
    assert done.exit_code == ExitCode.USAGE
    assert "not a regular file" in done.output + capfd.readouterr().err
    assert pipe.is_fifo()


def test_a_link_stays_one_and_leads_to_what_was_written(folder, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    done = CliRunner().invoke(app, [str(folder), "--out", str(link), "--block-tokens", "32"])
    assert done.exit_code == ExitCode.DONE
    assert link.is_symlink() and load_descriptor(target).block_tokens == 32
