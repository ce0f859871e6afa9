// What is kept of somebody, how to opt out, and deletion, which says first what it will do.
import { ask } from "/ui/api.js";
import { count, h, panel, show } from "/ui/dom.js";

const NAMES = [
  ["key", "Key", "its id, as `swarm-gateway keys list` names it"],
  ["session", "Session", "the name of the conversation"],
  ["user", "User", "as the application names them"],
  ["request_id", "Request", "its x-request-id"],
];
const ADMIN = "This needs a key that was made with --admin: a deletion is of all routes.";

/** The screen under `#/data`. */
export async function openData(main, app) {
  const fields = NAMES.map(([name, label, hint]) => [h("label", {}, label, h("input", { name, placeholder: hint, maxlength: 200 }))]);
  const routes = app.me.routes.length > 1 ? h("label", {}, "Route, whose swarm server is asked", h("select", { name: "route" }, app.me.routes.map((name) => h("option", { value: name }, name)))) : null;
  const told = h("div", { role: "status" });
  const form = h("form.data", { onsubmit: report, oninput: () => show(told) }, fields, routes, h("button.main", {}, "What is kept?"));
  show(
    main,
    h("div.crumbs", {}, h("h1", {}, "Data")),
    panel("What is kept of somebody", 0, app.me.admin ? [h("p.note", {}, "What several names say must all fit. Nothing is deleted before you have seen what there is."), form, told] : h("p.note.warn", {}, ADMIN)),
    panel("Opting out", 0, h("p", {}, "A request with the header ", h("code", {}, "x-swarm-train: false"), " is answered, and neither kept nor trained. For all requests of a key: ", h("code", {}, "swarm-gateway keys create NAME --no-train"), ". Where people have to agree first: ", h("code", {}, "data: {consent: opt_in}"), " in the settings of a route. What was kept before stays until it is deleted.")),
  );

  async function report(event) {
    event.preventDefault();
    const query = new URLSearchParams([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]).filter(([, value]) => value));
    try {
      const kept = await ask(`/data?${query}`);
      show(told, lines(kept), h("p.moves", {}, h("button", { type: "button", onclick: () => confirmed(kept, query) }, "Delete it …")));
    } catch (failure) {
      show(told, h("p.note.warn", {}, failure.message));
    }
  }

  function confirmed(kept, query) {
    const wrong = h("p.note.warn", { role: "alert" });
    const dialog = h("dialog", { "aria-label": "Delete for good", onclose: () => dialog.remove() }, h("h2", {}, "Delete for good"), lines(kept), h("p", {}, "And what this gateway has of it: lines of its request log, conversations, groups of this page and their judgements. Weights that learned from it stay as they are; so do copies that you made."), wrong, h("p.moves", {}, h("button.main", { onclick: remove }, "Delete for good"), h("button", { onclick: () => dialog.close() }, "Cancel")));
    document.body.append(dialog);
    dialog.showModal();
    async function remove() {
      try {
        const done = await ask(`/data/delete?${query}`, "POST");
        dialog.close();
        show(told, lines(done));
      } catch (failure) {
        wrong.textContent = failure.message;
      }
    }
  }
  return { keys: {}, writing: () => told.children.length > 0 || form.contains(document.activeElement) };
}

function lines({ deleted, episodes, requests, versions, clean_step: clean, gateway, earlier }) {
  const states = Object.entries(episodes).map(([state, n]) => `${n} ${state}`);
  const learned = versions.map((version) => version.step).join(", ");
  return h(
    "ul",
    {},
    h("li", {}, `${deleted ? "Deleted" : "Kept"}: ${states.length ? `episodes ${states.join(", ")}` : "no episodes"}, of ${count(requests.length, "request")}.`),
    Object.entries(gateway).map(([name, n]) => h("li", {}, `Deleted at this gateway: ${n} ${name.replaceAll("_", " ")}.`)),
    earlier.length ? h("li", {}, `Deleted before: ${count(earlier.reduce((sum, stone) => sum + stone.episodes, 0), "episode")}.`) : null,
    h("li", {}, versions.length ? `Policy versions that learned from it: ${learned}. The newest without it: ${clean ? `step ${clean}` : "the model that the run began with"}.` : "No policy version learned from what is left."),
  );
}
