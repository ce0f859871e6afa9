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

/** `slow(seconds)` is called while an answer is late, with 0 when it is there; `login(message)` when one is needed.
 * @type {{slow: (seconds: number) => void, login: (message: string) => void}} */
export const listeners = { slow: () => {}, login: () => {} };

/** When each question was asked that has no answer yet. */
const waiting = new Map();
const tellSlow = () => {
  const seconds = Math.round((performance.now() - Math.min(...waiting.values())) / 1000);
  listeners.slow(seconds < SLOW ? 0 : seconds);
};
setInterval(() => waiting.size && tellSlow(), 1000);

/** Ask the gateway; the answer's JSON, within so many seconds at `most`.
 * @throws {Failure} */
export async function ask(path, method = "GET", body = undefined, most = SECONDS) {
  const signal = AbortSignal.timeout(most * 1000);
  waiting.set(signal, performance.now());
  let response, text;
  try {
    response = await fetch(`/ui/api${path}`, { method, headers: method === "GET" ? {} : HEADERS, body: body && JSON.stringify(body), signal });
    text = await response.text();
  } catch {
    if (signal.aborted) throw new Failure(`The gateway has not answered within ${most} seconds.`, 0, "slow");
    throw new Failure("The gateway cannot be reached.", 0, "gone");
  } finally {
    waiting.delete(signal);
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
