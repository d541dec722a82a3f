// The page does what the harness asks: {id, call, args} comes over a WebSocket, and
// {id, result} or {id, error} goes back.

import { hex, unhex } from "./wire.mjs";
import { Session } from "./session.mjs";

const sessions = [];
const requests = [];
const kept = (list, value) => list.push(value) - 1;
const answered = ({ request, answer }) => ({ request: kept(requests, request), answer });

// A WebTransport session without MOQT on it.
const bare = async ({ url, hash, protocols }) => {
  const serverCertificateHashes = [{ algorithm: "sha-256", value: unhex(hash) }];
  const transport = new WebTransport(url, { protocols, serverCertificateHashes });
  transport.closed.catch(() => {});
  await transport.ready;
  return transport;
};

const codeOf = (promise) => promise.then(() => "no error", (why) => why.streamErrorCode);

// A stream that the peer knows.
const known = async (transport) => {
  const stream = await transport.createBidirectionalStream();
  const writer = stream.writable.getWriter();
  writer.closed.catch(() => {});
  await writer.write(Uint8Array.of(0));
  const reader = stream.readable.getReader();
  await reader.read();
  return { writer, reader };
};

const failure = (streamErrorCode) =>
  new WebTransportError({ message: "by the page", streamErrorCode });

const resetWith = async (transport, code) => {
  const { writer, reader } = await known(transport);
  const back = codeOf(reader.read());
  await writer.abort(failure(code)).catch(() => {});
  return back;
};

// Chromium tells a page that its stream was stopped, but not always the code: asked again then.
const stoppedWith = async (transport, code) => {
  for (let attempts = 20; attempts; attempts--) {
    const { writer, reader } = await known(transport);
    const back = codeOf(writer.closed);
    await reader.cancel(failure(code)).catch(() => {});
    if ((await back) !== null) return back;
  }
  return null;
};

const calls = {
  async open({ url, hash, protocols }) {
    const session = await Session.open(url, { protocols, hash: unhex(hash) });
    const setup = await session.setup.promise;
    return { session: kept(sessions, session), protocol: session.transport.protocol, setup };
  },

  close: ({ session, code, reason }) =>
    sessions[session].transport.close({ closeCode: code, reason }),
  closed: ({ session }) => sessions[session].closed,
  goaway: ({ session }) => sessions[session].goaway.promise,
  faults: ({ session }) => sessions[session].faults,

  subscribe: async ({ session, namespace, track, filter }) =>
    answered(await sessions[session].subscribe(namespace, track, filter)),
  fetch: async ({ session, namespace, track, filter }) =>
    answered(await sessions[session].fetch(namespace, track, filter)),
  publish_namespace: async ({ session, namespace }) =>
    answered(await sessions[session].publishNamespace(namespace)),

  // The next Object of a request; null when there is none to come.
  next: ({ request }) => requests[request].objects.next(),
  // All Objects of a request that have come and were not asked for yet.
  taken: ({ request }) => requests[request].objects.values.splice(0),
  streams: ({ request, count }) => requests[request].streamsEnded(count),
  done: ({ request }) => requests[request].done.promise,
  cancel: ({ request, code }) => requests[request].cancel(code),

  async accept({ session, alias }) {
    const request = await sessions[session].accept(alias);
    return { request: kept(requests, request), answer: request.message };
  },
  subgroup: ({ request, group, subgroup, payloads, code }) =>
    requests[request].session.subgroup(
      requests[request], group, subgroup, payloads.map(unhex), code ?? undefined,
    ),
  datagram: ({ request, group, object, payload }) =>
    requests[request].session.sendDatagram(requests[request], group, object, unhex(payload)),
  // PUBLISH_DONE, and the end of the request stream.
  async finish({ request, octets }) {
    await requests[request].send(unhex(octets));
    await requests[request].writer.close();
  },
  // The code with which the peer reset a request's stream.
  reset_code: ({ request }) => codeOf(requests[request].next()),

  // Octets on a request stream of their own, as a page with a fault would send them.
  async raw({ session, octets }) {
    const stream = await sessions[session].transport.createBidirectionalStream();
    await stream.writable.getWriter().write(unhex(octets));
  },

  // Resets and stops a stream with each code; the peer does the same with what it was told.
  async codes({ codes, ...where }) {
    const transport = await bare(where);
    const found = [];
    for (const code of codes) {
      found.push([await resetWith(transport, code), await stoppedWith(transport, code)]);
    }
    transport.close();
    return found;
  },

  // Opens a session and closes it, or is closed: how it ended for the page.
  async end({ code, reason, ...where }) {
    const transport = await bare(where);
    if (code !== null) transport.close({ closeCode: code, reason });
    const ended = await transport.closed;
    return { code: ended.closeCode, reason: ended.reason };
  },

  // Ends all that the case before left.
  reset() {
    for (const { transport } of sessions.splice(0)) transport.close();
    requests.splice(0);
  },
};

const plain = (key, value) => {
  if (typeof value === "bigint") return value.toString();
  return value instanceof Uint8Array ? hex(value) : value;
};

const socket = new WebSocket(`ws://${location.host}/drive`);
socket.onmessage = async ({ data }) => {
  const { id, call, args } = JSON.parse(data);
  let answer;
  try {
    answer = { id, result: (await calls[call](args)) ?? null };
  } catch (why) {
    answer = { id, error: String(why) };
  }
  socket.send(JSON.stringify(answer, plain));
};
