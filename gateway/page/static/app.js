// The frame: which screen is open, the keys, the login, and what is wrong with the gateway, in words.
import { Failure, ask, listeners, stream } from "/ui/api.js";
import { empty, h, show, tick } from "/ui/dom.js";
import { openGroups, order } from "/ui/groups.js";

const by = (id) => document.getElementById(id);
const [main, banner, live, who, toastBox] = ["main", "banner", "live", "who", "toast"].map(by);
let screen = { keys: {} };
let opening = 0;
/** Rows that come while a screen is read, which need not have them. */
let came = null;
/** Who looks is asked together with what the first screen needs. */
let knowing = null;
let events = null;
let goneSince = 0;
let timer = 0;
let toastTimer = 0;

const app = {
  me: null,
  go: (id) => (location.hash = `#/group/${encodeURIComponent(id)}`),
  list: () => (location.hash = `#/groups?${order.query}`),
  refresh: () => open(true),
  toast(text, bad = false) {
    clearTimeout(toastTimer);
    toastBox.textContent = text;
    toastBox.className = bad ? "toast shown bad" : "toast shown";
    toastTimer = setTimeout(() => (toastBox.className = "toast"), 6000);
  },
  /** Follow the events from `last` on; there is one stream. */
  follow(last) {
    events ??= stream(last, {
      live() {
        goneSince = 0;
        live.className = "live on";
        live.textContent = "live";
        say("");
      },
      gone() {
        goneSince ||= Date.now();
        live.className = "live off";
        live.textContent = "not live";
        say(`The gateway does not answer since ${new Date(goneSince).toLocaleTimeString()}. What you see is from before. The page tries again by itself.`);
      },
      group(row) {
        screen.group?.(row);
        came?.push(row);
      },
      reset: () => screen.writing?.() || open(true),
    });
  },
};

function say(text) {
  banner.hidden = !text;
  banner.textContent = text;
}

async function open(again = false) {
  const mine = ++opening;
  const missed = (came = []);
  clearTimeout(timer);
  if (!again) toastBox.className = "toast";
  const [, name = "groups", rest = ""] = /^#\/(\w+)\/?(.*)$/s.exec(location.hash) ?? [];
  const [part, params = ""] = rest.split("?");
  if (!app.me) (knowing = known()).catch(() => {});
  for (const link of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("nav a")))
    link.ariaCurrent = link.dataset.screen === (name === "group" ? "groups" : name) ? "page" : null;
  const place = again ? scrollY : 0;
  try {
    const opened = await drawn(name, decodeURIComponent(part), params || rest.slice(1));
    if (mine !== opening) return;
    screen = opened;
    for (const row of missed) screen.group?.(row);
    app.follow("");
    if (screen.every) timer = setInterval(() => document.hidden || goneSince || !getSelection().isCollapsed || open(true), screen.every * 1000);
    if (!goneSince) say("");
    scrollTo(0, place);
    for (const other of ["group", "learning", "data"]) script(other).catch(() => {});
  } catch (failure) {
    if (mine !== opening || !(failure instanceof Failure)) {
      if (mine === opening) throw failure;
      return;
    }
    if (failure.status === 401) return;
    if (!app.me && failure.status === 403) return login(failure.message);
    if (!again || !main.children.length) show(main, empty("This cannot be shown now", failure.message, h("button", { onclick: () => open() }, "Try again")));
    say(failure.message);
    screen = { keys: { r: ["try again", () => open()] } };
    if (failure.status === 0) timer = setTimeout(() => open(true), 5000);
  } finally {
    if (came === missed) came = null;
  }
}

/** The screen of this name, drawn. Groups are what people come for: the scripts of the others are read behind them. */
async function drawn(name, part, params) {
  const mine = opening;
  /** Read `path`; an answer that comes when another screen is open is never there, so it draws nothing. */
  const read = async (path) => {
    const answers = Promise.all([ask(path), knowing]);
    await answers.catch(() => {});
    return mine === opening ? (await answers)[0] : new Promise(() => {});
  };
  const here = Object.assign(Object.create(app), { read });
  if (name === "group") return (await script("group")).openGroup(main, part, here);
  if (name === "learning") return (await script("learning")).openLearning(main, here);
  if (name === "policies") return (await script("learning")).openPolicies(main, here);
  if (name === "data") return knowing.then(async () => (await script("data")).openData(main, here));
  return openGroups(main, params, here);
}

const script = (name) => import(`/ui/${name}.js`).catch(() => Promise.reject(new Failure("The gateway cannot be reached.", 0, "gone")));

/** Learn who looks. */
async function known() {
  app.me = await ask("/me");
  show(who, app.me.keyless ? h("span", {}, "no keys: this machine alone") : [h("span", {}, `${app.me.name}, may ${app.me.scope}`), h("button.quiet", { onclick: leave }, "Log out")], h("button.quiet", { onclick: help, title: "keys" }, "?"));
}

async function leave() {
  await ask("/logout", "POST").catch(() => {});
  login("You are logged out.");
}

function login(message) {
  app.me = null;
  opening++;
  events?.close();
  events = null;
  goneSince = 0;
  live.textContent = "";
  live.className = "live";
  say("");
  show(who);
  screen = { keys: {} };
  const key = h("input", { type: "password", autocomplete: "current-password", "aria-label": "Key of the gateway", placeholder: "sk-swarm-…", required: true });
  const wrong = h("p.note.warn", { role: "alert" }, message);
  const form = h("form.login", {}, h("h1", {}, "Look at the answers"), h("p", {}, "Log in with a key of this gateway that opens the page."), key, h("button.main", {}, "Log in"), wrong, h("p.note", {}, "Make one: ", h("code", {}, "swarm-gateway keys create NAME --page judge")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await ask("/login", "POST", { key: key.value });
      key.value = "";
      await (knowing = known());
      await open();
    } catch (failure) {
      wrong.textContent = failure.code === "login_needed" ? "The browser kept no cookie: beyond this machine, the page needs HTTPS." : failure.message;
    }
  });
  show(main, form);
  key.focus();
}

function help() {
  const lines = [...Object.entries(screen.keys), ["g", ["groups"]], ["i", ["is it learning?"]], ["p", ["policies"]], ["a", ["data"]], ["?", ["these keys"]]];
  const dialog = h("dialog.keys", { onclose: () => dialog.remove() }, h("h2", {}, "Keys"), h("dl", {}, lines.filter(([, [text]]) => text).map(([key, [text]]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), h("form", { method: "dialog" }, h("button.main", { autofocus: true }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const target = /** @type {HTMLElement} */ (event.target);
  if (target.closest("input, textarea, select")) return event.key === "Escape" ? target.blur() : undefined;
  if (event.key === "Enter" && target.closest("a, button, summary")) return;
  const everywhere = { "?": help, g: () => (location.hash = "#/groups"), i: () => (location.hash = "#/learning"), p: () => (location.hash = "#/policies"), a: () => (location.hash = "#/data") };
  const does = screen.keys[event.key]?.[1] ?? (app.me && everywhere[event.key]);
  if (!does) return;
  event.preventDefault();
  does();
});
// as a link it would lead to another screen
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), main.focus()));
listeners.slow = (seconds) => {
  if (seconds) say(`The gateway takes long to answer: ${seconds} s so far.`);
  else if (!goneSince) say("");
};
// what was asked at once is refused at once: a form that somebody writes into stays
listeners.login = (message) => document.querySelector("form.login") ?? login(message);
// a browser has six connections to one gateway: a tab that nobody sees holds none
document.addEventListener("visibilitychange", () => {
  if (document.hidden) events?.close();
  else events?.open();
  tick();
});
addEventListener("hashchange", () => open());
addEventListener("unhandledrejection", (event) => app.toast(`The page has a fault: ${event.reason?.message ?? event.reason}`, true));
setInterval(tick, 5000);
open();
