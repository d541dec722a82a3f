// A MOQT session of a browser: requests, and what arrives for them, on one WebTransport.

import * as wire from "./wire.mjs";

export const CANCELLED = 0x1;
const SERVERS = 1; // the least significant bit of a server's Request IDs

// Values that come and are waited for, in order. `end` lets those who wait go.
class Queue {
  constructor() {
    this.values = [];
    this.ended = false;
    this.wake = () => {};
  }

  push(value) {
    this.values.push(value);
    this.wake();
  }

  end() {
    this.ended = true;
    this.wake();
  }

  async next() {
    while (!this.values.length && !this.ended) {
      await new Promise((resolve) => (this.wake = resolve));
    }
    return this.values.shift();
  }
}

const deferred = () => {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  made.promise.catch(() => {});
  return made;
};

const reading = (readable) => {
  const reader = readable.getReader();
  const octets = new wire.Octets(async () => (await reader.read()).value);
  octets.cancel = (code) => reader.cancel(error(code)).catch(() => {});
  return octets;
};

const error = (streamErrorCode) =>
  new WebTransportError({ message: "by the page", streamErrorCode });

// One request: the stream it has for itself, and all that came for it.
export class Request {
  constructor(session, stream, id) {
    Object.assign(this, { session, id });
    this.octets = reading(stream.readable);
    this.writer = stream.writable.getWriter();
    this.writer.closed.catch(() => {});
    this.objects = new Queue();
    this.streams = []; // how each data stream ended: "fin", or the code of its reset
    this.open = 0; // data streams that have not ended
    this.alias = undefined;
    this.done = deferred(); // PUBLISH_DONE
    this.changed = () => {};
  }

  send(octets) {
    return this.writer.write(octets);
  }

  next() {
    return wire.message(this.octets);
  }

  // The publisher's messages after its answer, to the end of the stream.
  async follow() {
    try {
      for (let came; (came = await this.next()) !== undefined; ) {
        if (came.msg === "PUBLISH_DONE") this.done.resolve(came);
      }
      this.done.reject(new Error("the request stream ended without PUBLISH_DONE"));
    } catch (why) {
      this.done.reject(why);
    }
  }

  streamEnded(how) {
    this.open -= 1;
    this.streams.push(how);
    this.changed();
  }

  // Until `count` data streams have ended.
  async streamsEnded(count) {
    while (this.streams.length < count) {
      await new Promise((resolve) => (this.changed = resolve));
    }
    return this.streams;
  }

  // RESET_STREAM in the direction of ours, STOP_SENDING in the peer's.
  cancel(code = CANCELLED) {
    this.octets.cancel(code);
    this.writer.abort(error(code)).catch(() => {});
  }
}

export class Session {
  // Opens `url`; resolves when both SETUPs have crossed.
  static async open(url, { protocols, hash }) {
    const options = { protocols };
    if (hash) options.serverCertificateHashes = [{ algorithm: "sha-256", value: hash }];
    const session = new Session(new WebTransport(url, options));
    await session.transport.ready;
    await session.begin();
    return session;
  }

  constructor(transport) {
    this.transport = transport;
    this.closed = transport.closed.then(
      ({ closeCode, reason }) => ({ code: closeCode, reason }),
      (why) => ({ error: String(why) }),
    );
    this.requests = [];
    this.aliases = new Map(); // Track Alias to the promise of its Request
    this.fetches = new Map(); // Request ID to its Request
    this.asked = new Queue(); // requests of the peer
    this.goaway = deferred();
    this.setup = deferred();
    this.faults = []; // what arrived and should not have
  }

  async begin() {
    const writable = await this.transport.createUnidirectionalStream();
    this.control = writable.getWriter();
    this.control.closed.catch(() => {});
    await this.control.write(wire.setup());
    this.each(this.transport.incomingUnidirectionalStreams, (stream) => this.arrived(stream));
    this.each(this.transport.incomingBidirectionalStreams, (stream) => this.requested(stream));
    this.each(this.transport.datagrams.readable, (octets) => this.datagram(octets));
    await this.setup.promise;
  }

  // Handles all that a readable brings, each by itself; ends with the session.
  async each(readable, handle) {
    const reader = readable.getReader();
    try {
      for (let got; !(got = await reader.read()).done; ) {
        handle(got.value).catch((why) => this.faults.push(String(why)));
      }
    } catch {
      // the session is over
    }
  }

  requestOf(alias) {
    if (!this.aliases.has(alias)) this.aliases.set(alias, deferred());
    return this.aliases.get(alias).promise;
  }

  // ---- what the peer opens

  async arrived(stream) {
    const octets = reading(stream);
    const type = await octets.vi();
    if (type === wire.Type.SETUP) return this.controlled(octets);
    if (type === wire.PADDING) return octets.rest();
    if (type === wire.FETCH_HEADER) {
      const request = this.fetches.get(await octets.vi());
      if (!request) throw new wire.WireError("a fetch stream nobody asked for");
      return this.stream(request, wire.fetch_objects(octets));
    }
    const header = await wire.subgroup(octets, type);
    const request = await this.requestOf(header.alias);
    return this.stream(request, this.located(header, wire.subgroup_objects(octets, header)));
  }

  async *located(header, objects) {
    for await (const { id, status, payload } of objects) {
      const { group, subgroup } = header;
      yield { group, subgroup, object: id, status, payload, via: "stream" };
    }
  }

  // The Objects of a data stream, and how it ended.
  async stream(request, objects) {
    request.open += 1;
    let how = "fin";
    try {
      for await (const each of objects) request.objects.push(each);
    } catch (why) {
      if (!(why instanceof WebTransportError)) throw why;
      how = why.streamErrorCode;
    } finally {
      request.streamEnded(how);
    }
    if (this.fetches.has(request.id)) request.objects.end();
  }

  async datagram(octets) {
    const { alias, ...object } = await wire.read_datagram(wire.Octets.of(octets));
    (await this.requestOf(alias)).objects.push({ ...object, subgroup: null, via: "datagram" });
  }

  async controlled(octets) {
    // The type has been read: the first message goes on with its length.
    const [high, low] = await octets.take(2);
    const options = await wire.Octets.of(await octets.take(high * 256 + low)).pairs();
    this.setup.resolve(options);
    for (let came; (came = await wire.message(octets)) !== undefined; ) {
      if (came.msg !== "GOAWAY") throw new wire.WireError(`${came.msg} on the control stream`);
      this.goaway.resolve(came);
    }
    throw new wire.WireError("the control stream ended");
  }

  async requested(stream) {
    const request = new Request(this, stream);
    request.message = await request.next();
    request.id = request.message.request_id;
    if (request.id % 2 !== SERVERS) throw new wire.WireError(`Request ID ${request.id}`);
    this.asked.push(request);
  }

  // ---- what the page asks

  // A request stream of ours, its Request ID the next one.
  async request(encode) {
    const stream = await this.transport.createBidirectionalStream();
    const request = new Request(this, stream, 2 * this.requests.length);
    this.requests.push(request);
    return { request, first: encode(request.id) };
  }

  async subscribe(ns, name, filter) {
    const listed = filter ? [[wire.Parameter.LOCATION_FILTER, wire.location_filter(filter)]] : [];
    const { request, first } = await this.request((id) => wire.subscribe(id, ns, name, listed));
    await request.send(first);
    const answer = await request.next();
    if (answer.msg === "SUBSCRIBE_OK") {
      request.alias = answer.alias;
      this.requestOf(answer.alias);
      this.aliases.get(answer.alias).resolve(request);
      request.follow();
    }
    return { request, answer };
  }

  async fetch(ns, name, filter) {
    const listed = filter ? [[wire.Parameter.LOCATION_FILTER, wire.location_filter(filter)]] : [];
    const { request, first } = await this.request((id) => wire.fetch_(id, ns, name, listed));
    this.fetches.set(request.id, request);
    await request.send(first);
    return { request, answer: await request.next() };
  }

  async publishNamespace(ns) {
    const { request, first } = await this.request((id) => wire.publish_namespace(id, ns));
    await request.send(first);
    return { request, answer: await request.next() };
  }

  // The peer's next request, which has to be a SUBSCRIBE, accepted with `alias`.
  async accept(alias) {
    const request = await this.asked.next();
    if (request.message.msg !== "SUBSCRIBE") throw new Error(`asked was ${request.message.msg}`);
    request.alias = alias;
    await request.send(wire.subscribe_ok(alias));
    return request;
  }

  // A Subgroup on a stream of its own, ended with FIN, or with a reset once the octets are out.
  async subgroup(request, group, subgroup, payloads, code) {
    const stream = await this.transport.createUnidirectionalStream();
    const writer = stream.getWriter();
    writer.closed.catch(() => {});
    await writer.write(wire.subgroup_header(request.alias, group, subgroup));
    for (const payload of payloads) await writer.write(wire.next_object(payload));
    if (code === undefined) await writer.close();
    else await writer.abort(error(code)).catch(() => {});
  }

  async sendDatagram(request, group, object, payload) {
    const { datagrams } = this.transport;
    const writer = (datagrams.createWritable?.() ?? datagrams.writable).getWriter();
    await writer.write(wire.datagram(request.alias, group, object, payload));
    writer.releaseLock();
  }
}
