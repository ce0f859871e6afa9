// Elements and words. Texts of others reach the page through textContent alone: `h` makes no markup of a string.

/** What makes elements: `h("p.note", {title: "..."}, "text", child)`; a property that begins with "on" listens. */
const maker = (create) => (name, properties = {}, ...children) => {
  const [tag, ...classes] = name.split(".");
  const element = create(tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
};

export const h = maker((tag) => document.createElement(tag));
export const svg = maker((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

/** Replace what `parent` contains; a link, button or text that the keyboard is at, and that is there again, keeps it. */
export function show(parent, ...children) {
  const name = (element) => `${element.tagName} ${element.getAttribute("href")} ${element.textContent}`;
  const held = parent.querySelector(":is(a, button, summary, textarea):focus-visible");
  const all = () => [.../** @type {NodeListOf<HTMLElement>} */ (parent.querySelectorAll("a, button, summary, textarea"))];
  const like = () => (held ? all().filter((element) => name(element) === name(held)) : []);
  const before = like();
  parent.replaceChildren(...children.flat(3).filter(Boolean));
  const after = like();
  // where one of several is gone, the place may be another's
  if (after.length === before.length) after[before.indexOf(held)]?.focus({ preventScroll: true });
}

/** A number for people. */
export function number(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  // a small one is not zero, unless it is what sums of fractions leave
  const extreme = size >= 1e5 || (size > 1e-9 && size < 0.5 / 10 ** digits);
  return extreme ? value.toExponential(1) : String(Number(value.toFixed(digits)));
}

/** A share for people; of all alone it is 100 %. */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  const shown = Number((100 * share).toPrecision(2));
  return shown === 100 && share < 1 ? "> 99 %" : `${shown} %`;
}

/** "3 groups", "1 group". */
export const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

/** Seconds for people. */
export function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${number(seconds, 1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** A moment (Unix seconds) as its age, which `tick` keeps true. */
export function age(at, before = "", after = " ago") {
  const element = h("time", { datetime: new Date(at * 1000).toISOString(), title: new Date(at * 1000).toLocaleString() });
  element.dataset.at = String(at);
  element.dataset.words = JSON.stringify([before, after]);
  tell(element);
  return element;
}

function tell(element) {
  const [before, after] = JSON.parse(element.dataset.words);
  const seconds = Math.max(0, Date.now() / 1000 - Number(element.dataset.at));
  element.textContent = seconds < 5 ? `${before}just now` : `${before}${span(Math.max(5, Math.round(seconds)))}${after}`;
}

/** Bring all ages up to date. */
export function tick() {
  if (!document.hidden) for (const element of document.querySelectorAll("time[data-at]")) tell(element);
}

/** A panel with a title and the age of what it shows. */
export function panel(title, at, ...children) {
  return h("section.panel", {}, h("div.title", {}, h("h2", {}, title), at ? age(at, "as of ") : null), ...children);
}

/** What an empty place says: what it means and what to do next. */
export function empty(title, ...next) {
  return h("div.empty", {}, h("h2", {}, title), ...next.map((text) => (typeof text === "string" ? h("p", {}, text) : text)));
}

/** Ask before something is done: `does` runs once `words` is pressed, once at a time; what goes wrong is said where it was asked. */
export function confirm(title, words, does, ...inside) {
  const wrong = h("p.note.warn", { role: "alert" });
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", { onsubmit: send }, h("h2", {}, title), ...inside, wrong, h("p.moves", {}, h("button.main", {}, words), cancel));
  // a key that is still down from before decides nothing
  const onkeydown = (event) => event.repeat && event.key === "Enter" && event.preventDefault();
  const dialog = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-label": title, onclose: () => dialog.remove(), onkeydown }, form));
  document.body.append(dialog);
  dialog.showModal();
  let sending = false;
  async function send(event) {
    event.preventDefault();
    if (sending) return;
    sending = true;
    try {
      await does();
      dialog.close();
    } catch (failure) {
      wrong.textContent = failure.message;
      // the login that is shown then is behind the dialog
      if (failure.status === 401) dialog.close();
    } finally {
      sending = false;
    }
  }
}

/** Save what `element` shows as one HTML file that needs no server and runs no script. */
export async function save(element, name) {
  const style = await (await fetch("/ui/style.css")).text();
  const copy = element.cloneNode(true);
  for (const gone of copy.querySelectorAll("button, input, select, textarea, .keys, .no-file")) gone.remove();
  for (const link of copy.querySelectorAll("a")) link.removeAttribute("href");
  for (const folded of copy.querySelectorAll("details")) folded.setAttribute("open", "");
  const page = document.implementation.createHTMLDocument(name);
  const policy = page.createElement("meta");
  policy.httpEquiv = "content-security-policy";
  policy.content = "default-src 'none'; style-src 'unsafe-inline'";
  const charset = page.createElement("meta");
  charset.setAttribute("charset", "utf-8");
  const sheet = page.createElement("style");
  sheet.textContent = style;
  page.head.prepend(charset, policy);
  page.head.append(sheet);
  page.body.className = "file";
  page.body.append(copy, h("footer", {}, `${name}, saved ${new Date().toLocaleString()} by swarm-gateway. Secrets were removed by their form; names and other private texts were not.`));
  const text = `<!doctype html>\n${new XMLSerializer().serializeToString(page.documentElement)}`;
  const url = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  h("a", { href: url, download: `${name.replace(/[^A-Za-z0-9-]+/g, "-")}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
