// MOQT draft-22 on the wire, as far as the page needs it: octets to fields and back.
//
// Integers are Numbers up to 2^53 - 1 and BigInts above. Names are strings with a character an
// octet (Latin-1), payloads Uint8Arrays.

export const Type = {
  SETUP: 0x2f00, GOAWAY: 0x10, SUBSCRIBE: 0x03, SUBSCRIBE_OK: 0x04, REQUEST_ERROR: 0x05,
  PUBLISH_NAMESPACE: 0x06, REQUEST_OK: 0x07, PUBLISH_DONE: 0x0b, FETCH: 0x16, FETCH_OK: 0x18,
  PUBLISH: 0x1d, REQUEST_UPDATE: 0x02, PUBLISH_STATE_NOTIFY: 0x22,
};
const NAMES = Object.fromEntries(Object.entries(Type).map(([name, type]) => [type, name]));

export const FETCH_HEADER = 0x05;
export const PADDING = 0x132b3e28;
export const Parameter = { LARGEST_OBJECT: 0x09, FORWARD: 0x10, LOCATION_FILTER: 0x21 };
const FILTER_FIELDS = [0, 1, 2, 3, 4, 0];
const RANGE = { 0x8c: "does not exist", 0x10c: "unknown", 0x20c: "timed out" };

// The peer broke the draft's rules.
export class WireError extends Error {}

const small = (value) => (value <= Number.MAX_SAFE_INTEGER ? Number(value) : value);

// ---- writing

export const concat = (parts) => {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
};

// vi64: as many leading ones as there are octets after the first.
export const vi = (number) => {
  const value = BigInt(number);
  let more = 0;
  while (more < 8 && value >= 1n << BigInt(7 * (more + 1))) more++;
  const octets = new Uint8Array(more + 1);
  let rest = value;
  for (let at = more; at >= 0; at--) {
    octets[at] = Number(rest & 0xffn);
    rest >>= 8n;
  }
  octets[0] |= (0xff00 >> more) & 0xff;
  return octets;
};

export const latin1 = (text) => Uint8Array.from(text, (each) => each.charCodeAt(0));
const counted = (octets) => concat([vi(octets.length), octets]);
const text = (string) => counted(latin1(string));
const namespace = (fields) => concat([vi(fields.length), ...fields.map(text)]);

export const location_filter = (filter) => {
  const [type, ...fields] = filter;
  return concat([vi(type), ...fields.map(vi)]);
};

// `listed` is [[type, octets of the value], ...] in ascending order.
const parameters = (listed = []) => {
  let previous = 0;
  const parts = listed.map(([type, value]) => {
    const delta = type - previous;
    previous = type;
    return concat([vi(delta), value]);
  });
  return concat([vi(listed.length), ...parts]);
};

export const framed = (type, ...parts) => {
  const body = concat(parts);
  return concat([vi(type), Uint8Array.of(body.length >> 8, body.length & 0xff), body]);
};

export const setup = () => framed(Type.SETUP);
export const subscribe = (id, ns, name, listed) =>
  framed(Type.SUBSCRIBE, vi(id), namespace(ns), text(name), parameters(listed));
export const fetch_ = (id, ns, name, listed) =>
  framed(Type.FETCH, vi(id), namespace(ns), text(name), parameters(listed));
export const publish_namespace = (id, ns) =>
  framed(Type.PUBLISH_NAMESPACE, vi(id), namespace(ns), parameters());
export const subscribe_ok = (alias) => framed(Type.SUBSCRIBE_OK, vi(alias), parameters());
export const request_ok = () => framed(Type.REQUEST_OK, parameters());
export const request_error = (code, reason) =>
  framed(Type.REQUEST_ERROR, vi(code), vi(0), text(reason));
export const publish_done = (status, streams, reason) =>
  framed(Type.PUBLISH_DONE, vi(status), vi(streams), text(reason));

// SUBGROUP_HEADER: explicit Subgroup ID, default priority, begins with its first Object.
export const subgroup_header = (alias, group, subgroup) =>
  concat([vi(0x74), vi(alias), vi(group), vi(subgroup)]);
// An Object with a payload, its ID one more than that of the Object before (or 0).
export const next_object = (payload) => concat([vi(0), counted(payload)]);
export const datagram = (alias, group, object, payload) =>
  concat([vi(0x08), vi(alias), vi(group), vi(object), payload]);

// ---- reading

// Octets as they come: `pull` promises the next chunk, or undefined at the end.
export class Octets {
  constructor(pull) {
    this.pull = pull;
    this.chunks = [];
    this.length = 0;
    this.ended = false;
  }

  static of(octets) {
    const chunks = [octets];
    return new Octets(async () => chunks.shift());
  }

  // Whether `count` octets are here, or come before the end.
  async has(count) {
    while (this.length < count && !this.ended) {
      const chunk = await this.pull();
      if (chunk === undefined) this.ended = true;
      else if (chunk.length) {
        this.chunks.push(chunk);
        this.length += chunk.length;
      }
    }
    return this.length >= count;
  }

  async atEnd() {
    return !(await this.has(1));
  }

  async take(count) {
    if (!(await this.has(count))) throw new WireError("cut off in the middle");
    const parts = [];
    let wanted = count;
    while (wanted) {
      const first = this.chunks[0];
      const part = first.subarray(0, wanted);
      parts.push(part);
      wanted -= part.length;
      if (part.length === first.length) this.chunks.shift();
      else this.chunks[0] = first.subarray(part.length);
    }
    this.length -= count;
    return parts.length === 1 ? parts[0] : concat(parts);
  }

  async rest() {
    while (!this.ended) await this.has(this.length + 1);
    return this.take(this.length);
  }

  async u8() {
    return (await this.take(1))[0];
  }

  async vi() {
    const first = await this.u8();
    const more = Math.clz32(~(first << 24));
    let value = more < 7 ? BigInt(first & (0x7f >> more)) : 0n;
    for (const octet of await this.take(more)) value = (value << 8n) | BigInt(octet);
    return small(value);
  }

  async counted() {
    return this.take(await this.vi());
  }

  async text() {
    return String.fromCharCode(...(await this.counted()));
  }

  async many(count, read) {
    const found = [];
    for (let left = count; left; left--) found.push(await read());
    return found;
  }

  async location() {
    return [await this.vi(), await this.vi()];
  }

  async namespace() {
    return this.many(await this.vi(), () => this.text());
  }

  // Key-Value-Pairs to the end.
  async pairs() {
    const found = [];
    let type = 0;
    while (!(await this.atEnd())) {
      type += await this.vi();
      if (type % 2) found.push({ type, value_hex: hex(await this.counted()) });
      else found.push({ type, value: await this.vi() });
    }
    return found;
  }

  async parameters() {
    let type = 0;
    return this.many(await this.vi(), async () => {
      type += await this.vi();
      return { type, value: await this.parameter(type) };
    });
  }

  async parameter(type) {
    if ([0x02, 0x04, 0x06, 0x08, 0x0a, 0x32].includes(type)) return this.vi();
    if ([0x10, 0x20, 0x22, 0x35].includes(type)) return this.u8();
    if (type === Parameter.LARGEST_OBJECT) return this.location();
    if (type === Parameter.LOCATION_FILTER) {
      const kind = await this.vi();
      if (!(kind in FILTER_FIELDS)) throw new WireError(`LOCATION_FILTER type ${kind}`);
      return { type: kind, fields: await this.many(FILTER_FIELDS[kind], () => this.vi()) };
    }
    throw new WireError(`parameter ${type} has no business here`);
  }
}

export const hex = (octets) =>
  Array.from(octets, (each) => each.toString(16).padStart(2, "0")).join("");
export const unhex = (string) =>
  Uint8Array.from(string.match(/../g) ?? [], (each) => parseInt(each, 16));

const BODIES = {
  SETUP: async (o) => ({ options: await o.pairs() }),
  GOAWAY: async (o) => ({ uri: await o.text(), timeout: await o.vi() }),
  SUBSCRIBE: async (o) => request(o),
  FETCH: async (o) => request(o),
  PUBLISH_NAMESPACE: async (o) => ({
    request_id: await o.vi(), ns: await o.namespace(), params: await o.parameters(),
  }),
  PUBLISH: async (o) => ({
    request_id: await o.vi(), ns: await o.namespace(), name: await o.text(),
    alias: await o.vi(), params: await o.parameters(), props: await o.pairs(),
  }),
  REQUEST_UPDATE: async (o) => ({ request_id: await o.vi(), params: await o.parameters() }),
  PUBLISH_STATE_NOTIFY: async (o) => ({ params: await o.parameters() }),
  SUBSCRIBE_OK: async (o) => ({
    alias: await o.vi(), params: await o.parameters(), props: await o.pairs(),
  }),
  REQUEST_OK: async (o) => ({ params: await o.parameters(), props: await o.pairs() }),
  REQUEST_ERROR: async (o) => ({
    code: await o.vi(), retry: await o.vi(), reason: await o.text(),
  }),
  PUBLISH_DONE: async (o) => ({
    status: await o.vi(), streams: await o.vi(), reason: await o.text(),
  }),
  FETCH_OK: async (o) => ({
    end_of_track: await o.u8(), end: await o.location(),
    params: await o.parameters(), props: await o.pairs(),
  }),
};

const request = async (o) => ({
  request_id: await o.vi(), ns: await o.namespace(), name: await o.text(),
  params: await o.parameters(),
});

// The next control message, or undefined when the stream has ended between two.
export const message = async (octets) => {
  if (await octets.atEnd()) return undefined;
  const type = await octets.vi();
  const [high, low] = await octets.take(2);
  const body = Octets.of(await octets.take(high * 256 + low));
  const msg = NAMES[type];
  if (msg === undefined) throw new WireError(`message type ${type}`);
  const fields = await BODIES[msg](body);
  if (!(await body.atEnd())) throw new WireError(`octets after the fields of ${msg}`);
  return { msg, ...fields };
};

// What follows the type of a subgroup stream; Subgroup ID null is that of the first Object.
export const subgroup = async (octets, flags) => {
  if (flags >= 0x80 || !(flags & 0x10) || (flags & 0x06) === 0x06)
    throw new WireError(`unknown stream type ${flags}`);
  const header = { flags, alias: await octets.vi(), group: await octets.vi(), subgroup: 0 };
  if ((flags & 0x06) === 0x02) header.subgroup = null;
  if ((flags & 0x06) === 0x04) header.subgroup = await octets.vi();
  header.priority = flags & 0x20 ? null : await octets.u8();
  return header;
};

// The Objects of a subgroup stream as they are complete. The header learns its Subgroup ID.
export async function* subgroup_objects(octets, header) {
  let id = -1;
  while (!(await octets.atEnd())) {
    const delta = await octets.vi();
    id = id < 0 ? delta : id + delta + 1;
    const props = header.flags & 0x01 ? await Octets.of(await octets.counted()).pairs() : [];
    const length = await octets.vi();
    const status = length === 0 ? await octets.vi() : 0;
    header.subgroup ??= id;
    yield { id, props, status, payload: await octets.take(length) };
  }
}

// The Objects of an ascending fetch stream, and the ranges of which there are none.
export async function* fetch_objects(octets) {
  const prior = { group: 0, object: -1, subgroup: 0, priority: 128, begun: false };
  while (!(await octets.atEnd())) {
    const flags = await octets.vi();
    if (flags >= 0x80) {
      if (!(flags in RANGE)) throw new WireError(`fetch flags ${flags}`);
      [prior.group, prior.object] = await octets.location();
      prior.begun = true;
      yield { range: RANGE[flags], group: prior.group, object: prior.object };
      continue;
    }
    if (flags & 0x08) prior.group = (await octets.vi()) + (prior.begun ? prior.group + 1 : 0);
    if (!(flags & 0x40)) {
      if ((flags & 0x03) === 0) prior.subgroup = 0;
      if ((flags & 0x03) === 2) prior.subgroup += 1;
      if ((flags & 0x03) === 3) prior.subgroup = await octets.vi();
    }
    if (flags & 0x04) prior.object = (await octets.vi()) + (flags & 0x08 ? 0 : prior.object);
    else prior.object += 1;
    if (flags & 0x10) prior.priority = await octets.u8();
    const props = flags & 0x20 ? await Octets.of(await octets.counted()).pairs() : [];
    prior.begun = true;
    const { group, object, priority } = prior;
    const subgroup = flags & 0x40 ? null : prior.subgroup;
    yield { group, object, subgroup, priority, props, payload: await octets.counted() };
  }
}

export const read_datagram = async (octets) => {
  const flags = await octets.vi();
  if (flags & ~0x2f || (flags & 0x22) === 0x22) throw new WireError(`datagram type ${flags}`);
  const found = { alias: await octets.vi(), group: await octets.vi() };
  found.object = flags & 0x04 ? 0 : await octets.vi();
  found.priority = flags & 0x08 ? null : await octets.u8();
  found.props = flags & 0x01 ? await Octets.of(await octets.counted()).pairs() : [];
  found.status = flags & 0x20 ? await octets.vi() : 0;
  found.payload = await octets.rest();
  return found;
};
