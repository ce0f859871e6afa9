// The list of groups: a prompt with N dots on a reward axis; found by view, words, route, key and policy.
import { ask } from "/ui/api.js";
import { dots, scale, ticks } from "/ui/draw.js";
import { age, count, empty, h, number, percent, show } from "/ui/dom.js";

const VIEWS = [
  ["newest", "Newest"],
  ["unjudged", "To judge"],
  ["disagree", "Hook and people disagree"],
  ["lost", "Challenger lost"],
  ["spread", "Widest spread"],
  ["best", "Best"],
  ["worst", "Worst"],
  ["equal", "All equal"],
];
const NOTHING = {
  disagree: "Nobody has judged otherwise than the hook yet. Open a group and press the number of the answer that you prefer.",
  lost: "No group's answers were judged worse than the incumbent's to the same request. A takeover compares them.",
  equal: "No group has equal rewards: the hook tells all answers apart.",
  unjudged: "Every group here is judged.",
};

/** The list that was shown last, for the next and the previous group, and which was chosen. */
export const order = { ids: [], query: "", last: "" };

/** The list under `#/groups?...`. */
export async function openGroups(main, params, app) {
  const query = new URLSearchParams(params);
  const view = query.get("view") ?? "newest";
  order.query = query.toString();
  let answer = await app.read(`/groups?${query}`);
  app.follow(answer.last);
  let rows = answer.groups;
  const began = answer.at;
  const fresh = new Map();
  let touched = false;
  let chosen = Math.max(0, rows.findIndex((row) => row.id === order.last));

  const go = (name, value) => {
    if (value) query.set(name, value);
    else query.delete(name);
    location.hash = `#/groups?${query}`;
  };
  const select = (name, label, values) =>
    values.length > 1 || query.get(name)
      ? h("label.choice", {}, `${label} `, h("select", { onchange: (event) => go(name, event.target.value) }, h("option", { value: "" }, "all"), values.map((value) => h("option", { value, selected: String(value) === query.get(name) }, String(value)))))
      : null;
  const words = h("input", { type: "search", placeholder: "Words in prompts, answers, reasons", "aria-label": "Words", value: query.get("words") ?? "", onchange: (event) => go("words", event.target.value.trim()) });
  const list = h("ol.rows", { "aria-label": "Groups" });
  const pill = h("button.pill", { hidden: true, onclick: () => app.refresh() });
  const head = h(
    "div.filters",
    {},
    h("div.views", { role: "group", "aria-label": "Which groups" }, VIEWS.map(([name, label]) => h("button", { "aria-pressed": String(name === view), onclick: () => go("view", name) }, label))),
    h("div.find", {}, words, select("route", "Route", app.me.routes), select("key", "Key", answer.keys), select("policy", "Policy", answer.policies)),
  );

  function draw() {
    const axis = scale(rows.flatMap((row) => row.rewards).filter((reward) => reward !== null));
    order.ids = rows.map((row) => row.id);
    chosen = Math.min(chosen, Math.max(0, rows.length - 1));
    if (!rows.length) return show(list, h("li", {}, nothing(answer, view, query)));
    show(
      list,
      h("li.legend", {}, h("span", {}, h("span", {}, answer.fitting > rows.length ? `${rows.length} of ${count(answer.fitting, "group")}` : count(rows.length, "group")), " · ", age(answer.at, "as of ")), ticks(axis), h("span", {}, "state")),
      rows.map((row, place) => line(row, axis, place)),
    );
  }
  const line = (row, axis, place) =>
    h(
      "li.row",
      { "aria-current": place === chosen ? "true" : null, onclick: () => app.go(row.id) },
      h("div.asked", {}, h("a.prompt", { href: `#/group/${row.id}` }, row.prompt || "(no text)"), h("div.meta", {}, facts(row))),
      dots(row, axis),
      h("div.state", {}, state(row)),
    );

  function choose(place) {
    touched = true;
    if (!rows.length) return;
    list.children[chosen + 1]?.removeAttribute("aria-current");
    chosen = Math.max(0, Math.min(rows.length - 1, place));
    const element = list.children[chosen + 1];
    element.setAttribute("aria-current", "true");
    element.scrollIntoView({ block: "nearest" });
    order.last = rows[chosen].id;
  }
  show(main, h("h1.unseen", {}, "Groups"), head, agreementLine(answer.agreement), pill, list);
  draw();
  if (chosen) choose(chosen);

  return {
    writing: () => document.activeElement === words && words.value !== (query.get("words") ?? ""),
    group(row) {
      const place = rows.findIndex((other) => other.id === row.id);
      if (place >= 0) {
        rows[place] = row;
        draw();
        return;
      }
      // an earlier group that does not fit, or is beyond the last row
      if (row.at < began) return;
      fresh.set(row.id, row);
      const plain = view === "newest" && [...query.keys()].every((name) => name === "view");
      // nothing moves under the eyes of who reads
      if (plain && !touched && scrollY < 40) {
        rows = [...fresh.values(), ...rows].sort((a, b) => b.at - a.at).slice(0, 100);
        answer = { ...answer, at: Date.now() / 1000, fitting: answer.fitting + fresh.size };
        fresh.clear();
        draw();
      }
      pill.hidden = fresh.size === 0;
      pill.textContent = `${count(fresh.size, "new group")}: press r`;
    },
    keys: {
      j: ["next group", () => choose(chosen + 1)],
      ArrowDown: ["", () => choose(chosen + 1)],
      k: ["previous group", () => choose(chosen - 1)],
      ArrowUp: ["", () => choose(chosen - 1)],
      Enter: ["open the group", () => rows.length && app.go(rows[chosen].id)],
      "/": ["search by words", () => words.focus()],
      v: ["next view", () => go("view", VIEWS[(VIEWS.findIndex(([name]) => name === view) + 1) % VIEWS.length][0])],
      r: ["read anew", () => app.refresh()],
    },
  };
}

/** Where and when a group was, as words. */
export const facts = (row) => [age(row.at), row.route && ` · ${row.route}`, row.key && ` · ${row.key}`, row.policy !== null && ` · policy ${row.policy}`, ` · ${count(row.size, "answer")}`];

/** What became of a group, as labels. */
export function state(row) {
  const labels = [];
  if (row.open) labels.push(h("span.tag.open", { title: "a judgement still trains" }, "open"));
  else if (row.fate === "trained") labels.push(h("span.tag.good", {}, "trained"));
  else if (row.fate) labels.push(h("span.tag.bad", { title: row.why }, row.fate.replaceAll("_", " ")));
  else labels.push(h("span.tag", {}, "under way"));
  if (row.user !== null) labels.push(h("span.tag", { title: "what the user said, from -1 to 1" }, `user ${row.user > 0 ? "+" : ""}${number(row.user)}`));
  const judges = Object.keys(row.picks).length;
  if (judges) labels.push(h("span.tag.judged", {}, judges === 1 ? "judged" : `judged by ${judges}`));
  if (row.lead !== null && row.lead < 0) labels.push(h("span.tag.warn", { title: "the incumbent's answer was judged better" }, `lost by ${number(-row.lead)}`));
  if (row.disagrees) labels.push(h("span.tag.warn", {}, "disagree"));
  return labels;
}

function agreementLine(agreement) {
  if (!agreement.compared) return null;
  const chance = agreement.chance === null ? "" : ` (by chance: ${percent(agreement.chance)})`;
  return h("p.note", {}, `People and the hook prefer the same answer in ${percent(agreement.share)} of ${count(agreement.compared, "group")}, 95 % interval ${percent(agreement.low)} to ${percent(agreement.high)}${chance}.`);
}

function nothing(answer, view, query) {
  if (!answer.all)
    return empty(
      "No group yet",
      "A group appears here as soon as a request has been answered N times and judged by the hook.",
      h("p", {}, "Send one: "),
      h("pre", {}, `curl ${location.origin}/v1/chat/completions -H "content-type: application/json" \\\n  -H "authorization: Bearer $KEY" \\\n  -d '{"messages": [{"role": "user", "content": "hello"}]}'`),
      "Requests whose texts may not be kept never appear. Groups of before the gateway's start are in `swarm-gateway groups list`.",
    );
  const more = [...query.keys()].some((name) => name !== "view");
  return empty("No group fits", more ? "Take a filter away, or search for other words." : (NOTHING[view] ?? "Groups with rewards appear here."));
}
