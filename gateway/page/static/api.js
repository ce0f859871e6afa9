// Everything that the page asks its gateway: requests with a deadline, and one stream of events.

const SECONDS = 20;
const SLOW = 2;
const HEADERS = { "content-type": "application/json" };

/** What went wrong, in words; `status` is 0 where nothing came back. */
export class Failure extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {{slow: (seconds: number) => void, login: (message: string) => void}} */
const listeners = { slow: () => {}, login: () => {} };

/** `slow(seconds)` is called while an answer is late, with 0 when it is there; `login(message)` when one is needed. */
export function on(kind, listener) {
  listeners[kind] = listener;
}

const late = new Map();

/** Ask the gateway; the answer's JSON, within so many seconds at `most`.
 * @throws {Failure} */
export async function ask(path, method = "GET", body = undefined, most = SECONDS) {
  const controller = new AbortController();
  const began = performance.now();
  const name = {};
  const timer = setInterval(() => {
    const seconds = Math.round((performance.now() - began) / 1000);
    if (seconds >= most) controller.abort();
    if (seconds >= SLOW) late.set(name, seconds);
    tellSlow();
  }, 1000);
  let response, text;
  try {
    response = await fetch(`/ui/api${path}`, { method, headers: method === "GET" ? {} : HEADERS, body: body && JSON.stringify(body), signal: controller.signal });
    text = await response.text();
  } catch {
    if (controller.signal.aborted) throw new Failure(`The gateway has not answered within ${most} seconds.`, 0, "slow");
    throw new Failure("The gateway cannot be reached.", 0, "gone");
  } finally {
    clearInterval(timer);
    late.delete(name);
    tellSlow();
  }
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    throw new Failure(`The gateway answered something else than it should (status ${response.status}).`, response.status);
  }
  if (response.ok) return answer;
  const error = answer?.error ?? {};
  const failure = new Failure(error.message || `The gateway refused this (status ${response.status}).`, response.status, error.code);
  if (response.status === 401 && path !== "/login") listeners.login(failure.message);
  throw failure;
}

const tellSlow = () => listeners.slow(Math.max(0, ...late.values()));

/** The stream of events, from `last` on. The browser opens it again by itself and says what it got last.
 * @param {{live: () => void, gone: () => void, group: (row: any) => void, reset: () => void}} does */
export function stream(last, does) {
  let source, timer;
  let backoff = 2000;
  const close = () => {
    clearTimeout(timer);
    timer = 0;
    source?.close();
  };
  const open = () => {
    close();
    source = new EventSource(`/ui/api/events?last=${encodeURIComponent(last)}`);
    source.onopen = () => {
      backoff = 2000;
      does.live();
    };
    source.onerror = broken;
    source.addEventListener("bye", () => (source.close(), broken()));
    for (const kind of ["group", "reset"])
      source.addEventListener(kind, (event) => {
        last = event.lastEventId;
        does[kind](JSON.parse(event.data));
      });
  };
  // a refusal closes it for good: ask why, and try again later and later
  const broken = () => {
    does.gone();
    if (source.readyState !== EventSource.CLOSED || timer) return;
    timer = setTimeout(async () => {
      const failure = await ask("/me").then(() => null, (failure) => failure);
      if (!timer || failure?.status === 401) return;
      if (!failure) return open();
      timer = 0;
      backoff = Math.min(30_000, backoff * 1.5);
      broken();
    }, backoff);
  };
  open();
  return { open, close };
}
