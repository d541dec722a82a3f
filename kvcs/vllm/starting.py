"""What both sides of an engine start with: the model's descriptor, and a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcs.client.client import Client
from kvcs.client.settings import ClientSettings
from kvcs.vllm.describe import RefusedError, check_descriptor, descriptor_of
from kvcs.vllm.settings import Settings
from kvsp.blocks.kv_files import load_descriptor
from kvsp.names.identity import Descriptor


def client_of(settings: Settings, descriptor: Descriptor) -> Client:
    """The client of this process. Raises what is wrong with a file, a URL or a setting."""
    return Client(
        settings.relays,
        scope_keys=settings.scope_key_file,
        descriptor=descriptor,
        cafile=settings.cafile,
        token=settings.token_file,
        kvsp=settings.kvsp,
        settings=ClientSettings(
            lookup_timeout=settings.lookup_timeout,
            stall=settings.stall,
            timeout=settings.timeout,
            keep_octets=settings.keep,
            keep_seconds=settings.keep_seconds,
            most_loads=max(ClientSettings.most_loads, settings.loads),
        ),
    )


def model_descriptor(settings: Settings, vllm_config: Any) -> Descriptor:
    """The descriptor of the model that runs: that of the file that was given, or one made from
    the model's folder. Raises RefusedError, FileError and DecodeError."""
    if settings.descriptor is not None:
        descriptor = load_descriptor(settings.descriptor)
        check_descriptor(descriptor, vllm_config)
        return descriptor
    folder = _folder(vllm_config.model_config)
    return descriptor_of(vllm_config, folder, settings.block_tokens)


def _folder(model: Any) -> Path:
    """Where the model's files are: it is named by their digests."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model.model, revision=getattr(model, "revision", None), local_files_only=True
            )
        )
    except Exception as error:  # noqa: BLE001  (of many kinds; none of them matters but its text)
        raise RefusedError(
            f"kvcs: the files of {model.model!r} are not found on this machine ({error}): caches "
            f"are named by the digests of the model's files. Give vLLM the model's folder, or a "
            f'"descriptor" file made by `kvcs-describe` in kv_connector_extra_config'
        ) from None
