"""The C extension against the Python that it stands for, on packets and frames drawn by lot.

What both are given is the same, and what comes back must be. As a program it builds the extension
with the sanitizers for addresses and undefined behaviour first, and runs under them; that takes
gcc and the headers of OpenSSL and Python.

    python -m tools.fuzz_native --minutes 10
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite

from moqt.quic.packets.layout import varint
from moqt.quic.packets.protection import Group, Keys, KeysOfDirection

SOURCE = Path(__file__).resolve().parent.parent / "moqt" / "quic" / "_packets.c"
SUITES = (
    CipherSuite.AES_128_GCM_SHA256,
    CipherSuite.AES_256_GCM_SHA384,
    CipherSuite.CHACHA20_POLY1305_SHA256,
)
IDS = (2, 6, 62, 66, 0x3FFE, 0x10002, 0x40000002)
LENGTHS = (0, 1, 3, 20, 300, 1200)


def context_of(suite: CipherSuite, secret: bytes) -> CryptoContext:
    """Keys that aioquic derives from `secret`."""
    context = CryptoContext()
    context.setup(cipher_suite=suite, secret=secret, version=QuicProtocolVersion.VERSION_1)
    return context


def keys_of(context: CryptoContext, native: Any, *, sealing: bool) -> Keys:
    """`Keys` of `native`, or of Python where that is None, that have seen no update."""
    keys = KeysOfDirection(native, sealing=sealing)
    keys.begin(context)
    return keys.of(context)


# ---- what is sealed


def draw_groups(dice: random.Random) -> list[Group]:
    """Groups as a connection makes them: of one packet, or of several that divide a frame."""
    groups: list[Group] = []
    for _ in range(dice.randint(0, 8)):
        if dice.random() < 0.5:
            frames = [_draw_frame(dice, 1) for _ in range(dice.randint(1, 4))]
            groups.append((1, frames))
        else:
            count = dice.randint(2, 40)
            groups.append((count, [_draw_frame(dice, count)]))
    return groups


def _draw_frame(dice: random.Random, count: int) -> Any:
    width = dice.choice((0, 4, 8)) if count == 1 else dice.choice((4, 8))
    most = {0: 0, 4: 1 << 20, 8: 1 << 60}[width]
    length = count * dice.choice((1, 3, 50, 400, 1300))
    if count == 1 and dice.random() < 0.1:
        length = 0
    data = memoryview(dice.randbytes(length))
    cuts = sorted({0, length, *(dice.randint(0, length) for _ in range(dice.randint(0, 3)))})
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    fin = dice.random() < 0.3
    return varint(dice.choice(IDS)), width, dice.randint(0, most), length, fin, pieces


# ---- what is opened


def draw_datagrams(
    dice: random.Random, context: CryptoContext, cid: bytes
) -> tuple[list[bytes], int, int]:
    """Datagrams, and the packet numbers expected next and largest.

    Most are packets of rising numbers with STREAM frames that go on where those before them
    ended; the others are late, double, damaged, short, of another key phase or connection, have
    reserved bits, frames of other kinds, or nothing.
    """
    number = dice.choice((0, 5, 255, 65_530, 1 << 20, (1 << 32) - 3, 1 << 40))
    largest = number - 1
    expected = dice.choice((number, max(0, largest)))
    offsets: dict[int, int] = {}
    datagrams: list[bytes] = []
    for _ in range(dice.randint(1, 40)):
        chance = dice.random()
        if chance < 0.05:
            number += dice.randint(1, 60)
        its = number
        if 0.05 < chance < 0.12:
            its = max(0, number - dice.randint(1, 30))
        else:
            number += 1
        first = 0x40 | dice.choice((0, 0x20)) | dice.choice((1, 1, 1, 0, 2, 3))
        if dice.random() < 0.01:
            first |= 0x04
        if dice.random() < 0.01:
            first |= dice.choice((0x08, 0x10, 0x18))
        size = (first & 3) + 1
        header = bytes([first]) + cid + (its & (1 << 8 * size) - 1).to_bytes(size, "big")
        packet = context.encrypt_packet(header, _draw_frames(dice, offsets, 4 - size), its)
        spoil = dice.random()
        if spoil < 0.02:
            broken = bytearray(packet)
            broken[dice.randrange(len(broken))] ^= 1 << dice.randrange(8)
            packet = bytes(broken)
        elif spoil < 0.03:
            packet = packet[: dice.randrange(len(packet) + 1)]
        elif spoil < 0.035:
            packet = bytes([first]) + cid + dice.randbytes(dice.randint(0, 60))
        datagrams.append(packet)
        if dice.random() < 0.03:
            datagrams.append(packet)
    return datagrams, expected, largest


def _draw_frames(dice: random.Random, offsets: dict[int, int], least: int) -> bytes:
    """The clear octets of a packet, at least so many: a shorter one could not be sampled."""
    if dice.random() < 0.08:
        return dice.randbytes(dice.randint(least, 100))
    parts = []
    for left in range(dice.choice((0, 0, 0, 1, 3)), -1, -1):
        if dice.random() < 0.1:
            parts.append(dice.choice((b"\x01", b"\0\0\0", b"\x02" + dice.randbytes(4))))
        stream = dice.choice(IDS[: dice.choice((1, 1, 1, len(IDS)))])
        offset = offsets.get(stream, 0)
        if dice.random() < 0.05:
            offset = dice.randrange(1 << 40)
        data = dice.randbytes(dice.choice(LENGTHS))
        kind = 0x08 | 0x04 * (offset > 0 or dice.random() < 0.3) | (dice.random() < 0.05)
        sized = left > 0 or dice.random() < 0.8
        frame = bytes([kind | 0x02 * sized]) + varint(stream)
        if kind & 0x04:
            frame += varint(offset)
        if sized:
            frame += varint(len(data))
        parts.append(frame + data)
        offsets[stream] = offset + len(data)
    clear = b"".join(parts)
    if dice.random() < 0.03:
        clear = clear[: dice.randrange(len(clear) + 1)]
    return clear.ljust(least, b"\0")


# ---- both beside each other


def compare(seed: int, native: Any) -> int:
    """Raises AssertionError where `native` and Python differ; returns how many packets."""
    dice = random.Random(seed)
    context = context_of(dice.choice(SUITES), dice.randbytes(32))
    cid = dice.randbytes(dice.choice((8, 8, 0, 20)))
    packets = 0

    number = dice.choice((0, 250, 65_500, 1 << 30, (1 << 62) - 1000))
    prefix = bytes([0x41 | dice.choice((0, 0x20))]) + cid
    groups = draw_groups(dice)
    ours = keys_of(context, None, sealing=True).seal(prefix, number, groups)
    theirs = keys_of(context, native, sealing=True).seal(prefix, number, groups)
    assert ours == theirs, f"seed {seed}: sealed otherwise"
    packets += len(ours)

    datagrams, expected, largest = draw_datagrams(dice, context, cid)
    index = 0
    pair = [keys_of(context, each, sealing=False) for each in (None, native)]
    while index < len(datagrams):
        results = [keys.open(datagrams, index, cid, 0, expected, largest) for keys in pair]
        assert results[0] == results[1], f"seed {seed}: opened otherwise"
        after, runs = results[0]
        for start, stop, *_ in runs:
            expected = max(expected, stop)
            if start > largest:
                largest = stop - 1
        index = max(after, index + 1)
    return packets + len(datagrams)


def load(path: Path) -> Any:
    """The extension in a file."""
    spec = spec_from_loader(
        "moqt.quic._packets", ExtensionFileLoader("moqt.quic._packets", str(path))
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(path: Path, *options: str) -> None:
    """Compile the extension to `path`. Raises CalledProcessError."""
    include = sysconfig.get_path("include")
    command = ["gcc", "-shared", "-fPIC", "-g", "-Wall", "-Wextra", "-Werror", *options]
    command += [f"-I{include}", str(SOURCE), "-o", str(path), "-lcrypto"]
    subprocess.run(command, check=True)


SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case")
    parser.add_argument("--module", type=Path, help="the extension, if it is built already")
    options = parser.parse_args()
    if options.module is None:
        if shutil.which("gcc") is None:
            print("fuzz_native: gcc is not here", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder) / "_packets.abi3.so"
            build(module, *SANITIZERS)
            found = [
                subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
                for name in ("libasan.so", "libubsan.so")
            ]
            again = [sys.executable, "-m", "tools.fuzz_native", "--module", str(module)]
            again += ["--minutes", str(options.minutes), "--seed", str(options.seed)]
            # Python itself frees nothing at its end, and its allocator would hide what is freed.
            environment = {
                "LD_PRELOAD": " ".join(found),
                "ASAN_OPTIONS": "detect_leaks=0",
                "PYTHONMALLOC": "malloc",
            }
            return subprocess.run(again, env={**os.environ, **environment}, check=False).returncode
    native = load(options.module)
    until = time.monotonic() + 60 * options.minutes
    seed, packets = options.seed, 0
    while time.monotonic() < until:
        packets += compare(seed, native)
        seed += 1
    print(f"{seed - options.seed} cases from seed {options.seed}, {packets} packets: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
