// What is kept of somebody, opting out, and deletion: each says first what it will do.
import { ask } from "/ui/api.js";
import { confirm, count, h, panel, show } from "/ui/dom.js";

const NAMES = [
  ["key", "Key", "its id, as `swarm-gateway keys list` names it"],
  ["session", "Session", "the name of the conversation"],
  ["user", "User", "as the application names them"],
  ["request_id", "Request", "its x-request-id"],
];
// a journal and a log that are long are read, and written anew
const SECONDS = 600;
const ADMIN = "What is kept of somebody, and its deletion, need a key that was made with --admin: a deletion is of all routes.";

/** The screen under `#/data`. */
export async function openData(main, app) {
  const { admin, scope, keyless, routes } = app.me;
  const mayRefuse = scope === "decide" && !keyless;
  const fields = NAMES.slice(0, admin ? 4 : 2).map(([name, label, hint]) => h("label", {}, label, h("input", { name, placeholder: hint })));
  const route = admin && routes.length > 1 ? h("label", {}, "Route, whose swarm server is asked", h("select", { name: "route" }, routes.map((name) => h("option", { value: name }, name)))) : null;
  const told = h("div", { role: "status" });
  const form = h("form.data", { onsubmit: (event) => (event.preventDefault(), said(admin ? report : refuse)), oninput: () => show(told) }, fields, route, admin ? h("button.main", {}, "What is kept?") : null, mayRefuse ? h(admin ? "button" : "button.main", { type: admin ? "button" : "submit", onclick: admin && (() => said(refuse)) }, "Opt out …") : null);
  show(
    main,
    h("div.crumbs", {}, h("h1", {}, "Data")),
    panel("Somebody's data", 0, admin ? null : h("p.note.warn", {}, ADMIN), admin || mayRefuse ? [h("p.note", {}, "What several names say must all fit. Nothing is done before you have seen what it does."), form, told] : null),
    panel("Other ways to opt out", 0, h("p", {}, "A request with the header ", h("code", {}, "x-swarm-train: false"), " is answered, and neither kept nor trained; with ", h("code", {}, "x-swarm-train: false; session"), " all that follows in its session too. A key can be made so: ", h("code", {}, "swarm-gateway keys create NAME --no-train"), ". Where people have to agree first: ", h("code", {}, "data: {consent: opt_in}"), " in the settings of a route.")),
  );

  /** Do what the form says, with what is wrong in words; what comes once something else is written there is not seen. */
  async function said(does) {
    const named = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]).filter(([, value]) => value));
    const place = h("div");
    show(told, place);
    try {
      await does(named, place);
    } catch (failure) {
      show(place, h("p.note.warn", {}, failure.message));
    }
  }

  async function report(named, place) {
    const query = new URLSearchParams(named);
    const kept = await ask(`/data?${query}`, "GET", undefined, SECONDS);
    const remove = async () => show(place, lines(await ask(`/data/delete?${query}`, "POST", undefined, SECONDS)));
    const asks = () => confirm("Delete for good", "Delete for good", remove, lines(kept), h("p", {}, "And what this gateway has of it: lines of its request log, conversations, groups of this page and their judgements. Weights that learned from it stay as they are; so do copies that you made."));
    show(place, lines(kept), h("p.moves", {}, h("button", { type: "button", onclick: asks }, "Delete it …")));
  }

  async function refuse({ key = "", session = "", user, request_id: request }, place) {
    if (user || request || !(key || session)) return show(place, h("p.note.warn", {}, "A key, a session or a key's session opts out: name these alone."));
    const whom = [session && `the session ${session}`, key ? `the key ${key}` : "any key"].filter(Boolean).join(" of ");
    const send = async () => {
      const { new: first } = await ask("/data/opt-out", "POST", { key, session });
      show(place, h("p", {}, first ? `From now on nothing of ${whom} is kept or trained.` : `This was so before: nothing of ${whom} is kept or trained.`));
    };
    confirm(`Opt out ${whom}`, "Opt out", send, h("p", {}, `Requests of ${whom} are answered as ever, with the best of N, and from now on neither kept nor trained: no header takes that back. It holds at each gateway with the same file of keys, within a second, and after a restart. What was kept before stays until it is deleted. Your name is noted in the audit log.`));
  }
  return { keys: {}, writing: () => told.children.length > 0 || form.contains(document.activeElement) };
}

function lines({ deleted, episodes, requests, versions, clean_step: clean, gateway, earlier, exports }) {
  const states = Object.entries(episodes).map(([state, n]) => `${n} ${state}`);
  const learned = versions.map((version) => version.step).join(", ");
  return h(
    "ul",
    {},
    h("li", {}, `${deleted ? "Deleted" : "Kept"}: ${states.length ? `episodes ${states.join(", ")}` : "no episodes"}, of ${count(requests.length, "request")}.`),
    Object.entries(gateway).map(([name, n]) => h("li", {}, `Deleted at this gateway: ${n} ${name.replaceAll("_", " ")}.`)),
    exports.map((name) => h("li", {}, `May hold it, and is yours to delete: ${name}.`)),
    earlier.length ? h("li", {}, `Deleted before: ${count(earlier.reduce((sum, stone) => sum + stone.episodes, 0), "episode")}.`) : null,
    h("li", {}, versions.length ? `Policy versions that learned from it: ${learned}. The newest without it: ${clean ? `step ${clean}` : "the model that the run began with"}.` : "No policy version learned from what is left."),
  );
}
