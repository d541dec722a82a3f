"""What the page reads and writes, run by node, against octets that other implementations made."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from interop.browser.page import FOLDER
from tests.paths import ROOT

NODE = shutil.which("node")
VECTORS = json.loads((ROOT / "tests/data/moqt-22-vectors.json").read_text())["vectors"]
READ = {
    "SETUP",
    "GOAWAY",
    "SUBSCRIBE",
    "SUBSCRIBE_OK",
    "REQUEST_OK",
    "REQUEST_ERROR",
    "PUBLISH",
    "PUBLISH_DONE",
    "PUBLISH_NAMESPACE",
    "PUBLISH_STATE_NOTIFY",
    "FETCH",
    "FETCH_OK",
}
"""The messages that a page may be sent here."""

pytestmark = pytest.mark.skipif(NODE is None, reason="no node here to run the page's code")

PROGRAM = """
import * as wire from %(wire)s;
const { hex, unhex, Octets } = wire;
const input = [];
for await (const chunk of process.stdin) input.push(chunk);
const each = async (iterable) => {
  const all = [];
  for await (const one of iterable) all.push(one);
  return all;
};
const kinds = {
  vi64: async (o) => ({ value: await o.vi() }),
  control: (o) => wire.message(o),
  subgroup_stream: async (o) => {
    const header = await wire.subgroup(o, await o.vi());
    const objects = await each(wire.subgroup_objects(o, header));
    return { ...header, objects };
  },
  fetch_stream: async (o) => {
    await o.vi();
    return { request_id: await o.vi(), objects: await each(wire.fetch_objects(o)) };
  },
  datagram: (o) => wire.read_datagram(o),
  calls: async (o, { call, args }) => hex(wire[call](...args)),
};
const found = [];
for (const one of JSON.parse(Buffer.concat(input))) {
  const octets = unhex(one.hex ?? "");
  const chunks = one.split ? Array.from(octets, (octet) => Uint8Array.of(octet)) : [octets];
  const o = new Octets(async () => chunks.shift());
  try {
    found.push({ result: await kinds[one.kind](o, one), left: !(await o.atEnd()) });
  } catch (why) {
    found.push({ error: why.constructor.name + ": " + why.message });
  }
}
const plain = (key, value) => {
  if (typeof value === "bigint") return `${value}`;
  return value instanceof Uint8Array ? hex(value) : value;
};
console.log(JSON.stringify(found, plain));
"""


def run(asked):
    """What the page's code makes of each of `asked`."""
    program = PROGRAM % {"wire": json.dumps((FOLDER / "wire.mjs").as_uri())}
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read(vectors, *, split=False):
    asked = [{"kind": each["kind"], "hex": each["hex"], "split": split} for each in vectors]
    return zip(vectors, run(asked), strict=True)


def of_kind(kind):
    return [each for each in VECTORS if each["kind"] == kind]


def without_names(params):
    return [{"type": each["type"], "value": each["value"]} for each in params]


def as_told(value):
    """What JSON has of it: JavaScript's numbers are exact to 2^53 only."""
    return str(value) if isinstance(value, int) and value >= 1 << 53 else value


def is_plain(vector):
    """Whether the page knows every parameter of the message."""
    known = {0x02, 0x04, 0x06, 0x08, 0x09, 0x0A, 0x10, 0x20, 0x21, 0x22, 0x32, 0x35}
    fields = vector["fields"]
    return "redirect" not in fields and {e["type"] for e in fields.get("params", ())} <= known


@pytest.mark.parametrize("split", [False, True], ids=["whole", "an octet at a time"])
def test_control_messages_are_read_as_the_vectors_say(split):
    chosen = [e for e in of_kind("control") if e["fields"]["msg"] in READ and is_plain(e)]
    assert {each["fields"]["msg"] for each in chosen} == READ
    for vector, found in read(chosen, split=split):
        wanted = dict(vector["fields"])
        if "params" in wanted:
            wanted["params"] = without_names(wanted["params"])
        wanted = {name: as_told(value) for name, value in wanted.items()}
        assert found == {"result": wanted, "left": False}, vector["name"]


def test_integers_of_every_length_are_read():
    vectors = of_kind("vi64")
    assert {each["fields"]["length"] for each in vectors} == set(range(1, 10))
    for vector, found in read(vectors):
        value = vector["fields"]["value"]
        assert found["result"]["value"] == as_told(value), vector["name"]


def test_integers_are_written_in_their_shortest_form():
    minimal = [each for each in of_kind("vi64") if "minimal" in each["name"].split()]
    small = [each for each in minimal if each["fields"]["value"] < 1 << 53]
    asked = [{"kind": "calls", "call": "vi", "args": [e["fields"]["value"]]} for e in small]
    assert len(small) > 8
    assert [each["result"] for each in run(asked)] == [each["hex"] for each in small]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "an octet at a time"])
def test_the_objects_of_subgroup_streams_are_read_as_the_vectors_say(split):
    vectors = of_kind("subgroup_stream")
    assert len(vectors) > 8
    for vector, found in read(vectors, split=split):
        wanted, got = vector["fields"], found["result"]
        objects = [(e["id"], e["payload"], e["status"], e["props"]) for e in got["objects"]]
        assert objects == [
            (e["id"], e.get("payload") or "", e.get("status", 0), e.get("props", []))
            for e in wanted["objects"]
        ], vector["name"]
        assert (got["alias"], got["group"]) == (wanted["alias"], wanted["group"])
        if wanted["objects"]:
            assert got["subgroup"] == wanted["subgroup"], vector["name"]
        if got["priority"] is not None:
            assert got["priority"] == wanted["priority"], vector["name"]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "an octet at a time"])
def test_the_objects_of_ascending_fetch_streams_are_read_as_the_vectors_say(split):
    vectors = [each for each in of_kind("fetch_stream") if each["fields"]["group_order"] == 1]
    assert len(vectors) > 8
    for vector, found in read(vectors, split=split):
        wanted, got = vector["fields"], found["result"]
        assert got["request_id"] == wanted["request_id"]
        assert len(got["objects"]) == len(wanted["objects"]), vector["name"]
        for ours, theirs in zip(got["objects"], wanted["objects"], strict=True):
            same = {"group", "object", "subgroup", "priority", "payload", "props"}
            same &= theirs.keys()
            assert {k: ours.get(k) for k in same} == {k: theirs[k] for k in same}, vector["name"]
            assert ("range" in ours) == ("payload" not in theirs), vector["name"]


def test_datagrams_are_read_as_the_vectors_say():
    vectors = [each for each in of_kind("datagram") if "alias" in each["fields"]]
    assert len(vectors) > 8
    for vector, found in read(vectors):
        wanted, got = vector["fields"], found["result"]
        for name in ("alias", "group", "object", "status", "payload"):
            assert got[name] == wanted.get(name, "" if name == "payload" else 0), vector["name"]


NS, NAME = ["demo", "live"], "video"
WRITTEN = {
    "SUBSCRIBE": ("subscribe", lambda f: [f["request_id"], NS, NAME, []]),
    "PUBLISH_NAMESPACE": ("publish_namespace", lambda f: [f["request_id"], f["ns"]]),
    "SUBSCRIBE_OK": ("subscribe_ok", lambda f: [f["alias"]]),
    "REQUEST_ERROR": ("request_error", lambda f: [f["code"], f["reason"]]),
    "PUBLISH_DONE": ("publish_done", lambda f: [f["status"], f["streams"], f["reason"]]),
}


def test_what_the_page_sends_has_the_octets_of_the_vectors():
    chosen = [
        each
        for each in of_kind("control")
        if each["fields"]["msg"] in WRITTEN
        and not each["fields"].get("params")
        and not each["fields"].get("props")
        and not each["fields"].get("retry")
        and each["fields"].get("ns", NS) in (NS, ["demo"])
        and each["fields"].get("streams", 0) < 1 << 53
        and "non-minimal" not in each["name"]
        and is_plain(each)
    ]
    assert {each["fields"]["msg"] for each in chosen} == WRITTEN.keys()
    asked = []
    for each in chosen:
        call, arguments = WRITTEN[each["fields"]["msg"]]
        asked.append({"kind": "calls", "call": call, "args": arguments(each["fields"])})
    assert [each["result"] for each in run(asked)] == [each["hex"] for each in chosen]


@pytest.mark.parametrize(
    ("octets", "kind"),
    [
        ("7e0000", "control"),  # no such message
        ("0400030000ff", "control"),  # octets after the fields
        ("0400", "control"),  # cut off in the length
        ("16010003", "subgroup_stream"),  # both bits of the Subgroup ID mode
        ("50010380000478", "subgroup_stream"),  # cut off in a payload
        ("0504808d0101", "fetch_stream"),  # no such range marker
        ("2201020304", "datagram"),  # a status that ends the Group
    ],
)
def test_what_breaks_the_draft_is_an_error_and_no_object(octets, kind):
    (found,) = run([{"kind": kind, "hex": octets}])
    assert found.get("error", "").startswith("WireError"), found
