// One group: answers side by side, what differs between them, why the hook likes which, and what you think.
import { ask } from "/ui/api.js";
import { differences, dots, scale } from "/ui/draw.js";
import { age, count, empty, h, number, save, show, span } from "/ui/dom.js";
import { facts, order, state } from "/ui/groups.js";

/** Whether groups are judged blind; it stays on from group to group. */
let blind = false;
/** Corrections that are being written, by writer and group: who comes back to one goes on with it. */
const drafts = new Map();
/** The orders in which groups are judged blind, by id. */
const orders = new Map();

/** The group under `#/group/ID`. */
export async function openGroup(main, id, app) {
  let group;
  try {
    group = await app.read(`/groups/${encodeURIComponent(id)}`);
  } catch (failure) {
    if (failure.status !== 404) throw failure;
    show(main, empty("This group is not here any more", failure.message, h("p", {}, h("a", { href: "#/groups" }, "Back to the list"))));
    return { keys: { Escape: ["back to the list", () => app.list()] } };
  }
  order.last = id;
  app.follow(group.last);
  const mayJudge = app.me.scope !== "look";
  const shuffled = shuffle(group.answers.map((answer) => answer.index), group.id);
  let focus = 0;
  let marked = true;
  const written = JSON.stringify([app.me.name, id]);
  /** Of which answer the correction is written, and what of it is there. */
  let { editing = null, draft = null } = (mayJudge && drafts.get(written)) || {};
  let busy = false;
  /** Whether the group changed while it could not be drawn. */
  let behind = false;

  const mine = () => group.judgements[app.me.name];
  const hidden = () => blind && !mine();
  const shown = () => {
    const indices = group.answers.map((answer) => answer.index);
    // what came late is behind the others
    return (hidden() ? [...new Set([...shuffled, ...indices])] : indices).map((index) => group.answers.find((answer) => answer.index === index));
  };

  function draw() {
    const answers = shown();
    const secret = hidden();
    focus = Math.min(focus, answers.length - 1);
    const base = baseOf(answers, secret);
    const axis = scale(group.rewards.filter((reward) => reward !== null));
    show(
      main,
      h("h1.unseen", {}, "A group"),
      h("div.crumbs", {}, h("a", { href: `#/groups?${order.query}` }, "← Groups"), h("span", {}, place()), h("button.quiet", { onclick: () => save(main, `group ${id.slice(0, 12)}`) }, "Save as a file")),
      asked(group),
      h("div.facts", {}, h("div", {}, facts(secret ? { ...group, policy: null } : group), more(secret)), h("div.state", {}, secret ? h("span.tag.judged", {}, "blind") : state(group))),
      group.why && !secret ? h("p.note.warn", {}, `The hook gave no rewards: ${group.why}`) : null,
      secret ? null : h("div.scale", {}, dots(group, axis, 40)),
      mayJudge ? tools(secret) : h("p.note", {}, "Your key may look. To judge, use a key that was made with --page judge."),
      h("div.answers", {}, answers.map((answer, n) => card(answer, n, base, secret))),
      said(),
    );
  }
  const place = () => {
    const at = order.ids.indexOf(id);
    return at < 0 ? "" : `${at + 1} of ${order.ids.length}`;
  };
  const more = (secret) => [
    !secret && group.hook && ` · hook ${group.hook.split("/").pop()}`,
    group.session && ` · session ${group.session.slice(0, 24)}`,
    group.tools ? ` · ${count(group.tools, "tool")}` : "",
  ];
  const tools = (secret) =>
    h(
      "div.tools.no-file",
      {},
      h("span.hint", {}, mine() ? judgedWords() : group.open ? "Which answer is best? Your pick trains." : "Which answer is best? Too late to train, your pick counts as evidence."),
      h("button", { "aria-pressed": String(blind), onclick: toggleBlind, title: "hide rewards and sides until you have judged" }, "Blind ", h("kbd", {}, "b")),
      h("button", { "aria-pressed": String(marked), onclick: toggleMarks }, "Differences ", h("kbd", {}, "d")),
      h("button", { onclick: () => edit() }, "Correct ", h("kbd", {}, "e")),
      h("button", { onclick: () => judge(null) }, "None is good ", h("kbd", {}, "0")),
      mine() ? h("button", { onclick: undo }, "Undo ", h("kbd", {}, "u")) : null,
      secret ? null : h("button", { onclick: () => step(1) }, "Next ", h("kbd", {}, "j")),
    );
  /** The number that an answer has where nothing is shuffled; answers that failed have none. */
  const numberOf = (index) => group.answers.findIndex((answer) => answer.index === index) + 1;
  const judgedWords = () => {
    const pick = mine();
    const words = pick.pick === null ? "You said that none is good." : `You picked ${numberOf(pick.pick)}.`;
    const agrees = pick.agrees === null || pick.agrees === undefined ? "" : pick.agrees ? " So did the hook." : " The hook prefers another.";
    return words + agrees;
  };

  const baseOf = (answers, secret) => {
    if (secret) return answers[0];
    const rated = answers.filter((answer) => answer.reward !== null);
    return rated.reduce((best, answer) => (answer.reward > best.reward ? answer : best), rated[0] ?? answers[0]);
  };

  function card(answer, n, base, secret) {
    const picked = mine()?.pick === answer.index;
    const text = h("div.text", {}, pieces(answer, base));
    const element = h(
      picked ? "article.card.picked" : "article.card",
      { "aria-label": `answer ${n + 1}`, "aria-current": n === focus ? "true" : null, onclick: () => focusOn(n) },
      h(
        "header",
        {},
        h("button.number", { disabled: !mayJudge, title: mayJudge ? `pick answer ${n + 1}` : "", onclick: () => judge(answer.index) }, String(n + 1)),
        secret ? h("span.reward.hidden", {}, "hidden") : h("span.reward", { title: "the hook's reward, before any judgement" }, number(answer.reward, 3)),
        !secret && answer.final !== null && answer.final !== answer.reward ? h("span.final", { title: "after feedback" }, `→ ${number(answer.final, 3)}`) : null,
        !secret && answer.delivered ? h("span.tag.got", {}, "the user got this") : null,
        picked ? h("span.tag.judged", {}, "your pick") : null,
      ),
      answer.reasoning ? fold(`Reasoning, ${count(answer.reasoning.split(/\s+/).length, "word")}`, h("div.text.thought", {}, answer.reasoning)) : null,
      editing === answer.index ? editor(answer) : text,
      answer.tool_calls.map((call) => fold(`Calls ${call.function?.name ?? "a tool"}`, h("pre", {}, pretty(call.function?.arguments ?? "")))),
      secret ? null : why(answer),
      h("footer", {}, [count(answer.tokens, "token"), span(answer.seconds), answer.finish !== "stop" && `ended by ${answer.finish}`, !secret && answer.version !== null && `weights ${answer.version}`].filter(Boolean).join(" · ")),
    );
    return element;
  }
  const pieces = (answer, base) => {
    if (!answer.text) return h("span.none", {}, "(no text)");
    if (!marked || answer === base) return answer.text;
    return differences(answer.text, base.text).map(([part, differs]) => (differs ? h("mark", {}, part) : part));
  };
  const why = (answer) => {
    const parts = Object.entries(answer.components);
    return parts.length || answer.reason
      ? h("div.why", {}, parts.length ? h("dl", {}, parts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value, 3))])) : null, answer.reason ? h("p", {}, answer.reason) : null)
      : null;
  };
  const fold = (title, ...inside) => h("details", {}, h("summary", {}, title), ...inside);
  const said = () => {
    const lines = Object.values(group.judgements).map((pick) => {
      const what = pick.pick === null ? "none is good" : `answer ${numberOf(pick.pick)}${pick.correction ? ", corrected" : ""}`;
      return h("li", {}, h("b", {}, pick.who), `: ${what}${pick.blind ? ", blind" : ""}, ${pick.trains ? "in time to train" : "after the group was submitted"} · `, age(Date.parse(pick.when) / 1000), pick.comment ? h("q", {}, pick.comment) : null, pick.correction ? h("div.text", {}, pick.correction) : null);
    });
    const signals = Object.entries(group.signals).map(([name, how]) => `${name} ${number(how)}`);
    if (group.user !== null || signals.length) lines.push(h("li", {}, h("b", {}, "the user"), `: ${[group.user === null ? "" : `rated ${number(group.user)}`, ...signals].filter(Boolean).join(", ")}`));
    return lines.length && !hidden() ? h("section.panel", {}, h("h2", {}, "What people said"), h("ul.said", {}, lines)) : null;
  };

  function editor(answer) {
    // without the words that it was cut, see _shortened of kept_groups.py
    const text = answer.text.replace(/\n\[\d+ more characters are not kept\]$/, "");
    const area = h("textarea", { "aria-label": "the corrected answer", rows: 8, maxlength: 65536, value: draft ?? text, oninput: () => drafts.set(written, { editing, draft: (draft = area.value) }) });
    area.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) judge(answer.index, area.value);
    });
    return h("div.editor", {}, area, h("div", {}, h("button.main", { onclick: () => judge(answer.index, area.value) }, "Keep the correction ", h("kbd", {}, "Ctrl Enter")), h("button", { onclick: leave }, "Cancel ", h("kbd", {}, "Esc"))));
  }
  function close() {
    editing = draft = null;
    drafts.delete(written);
  }
  function leave() {
    close();
    draw();
    catchUp();
  }
  function edit() {
    if (!mayJudge) return;
    editing ??= shown()[focus].index;
    draw();
    main.querySelector("textarea").focus();
  }
  async function judge(pick, correction = null) {
    if (!mayJudge || busy) return;
    const wasBlind = hidden();
    const seen = shown().findIndex((answer) => answer.index === pick) + 1;
    const picked = `Picked ${seen}${seen === numberOf(pick) ? "" : `, which is answer ${numberOf(pick)}`}.`;
    await say("POST", { pick, correction: correction ?? "", blind: wasBlind }, (kept) => {
      if (correction !== null) close();
      const trains = kept.trains ? "It trains: the hook sees it when the group closes." : "Too late to train: it counts as evidence.";
      return `${pick === null ? "None is good." : picked} ${trains}`;
    });
  }
  async function undo() {
    if (mine() && !busy) await say("DELETE", undefined, () => "Your judgement is taken back.");
  }
  /** Change your judgement; `words` are of what the gateway answers. */
  async function say(method, body, words) {
    busy = true;
    try {
      app.toast(words(await ask(`/groups/${encodeURIComponent(id)}/judgement`, method, body)));
      await refresh();
    } catch (failure) {
      app.toast(failure.message, true);
    } finally {
      busy = false;
      catchUp();
    }
  }
  /** Show what others changed, once that disturbs nothing. */
  function catchUp() {
    if (!behind || editing !== null || busy) return;
    behind = false;
    refresh().catch(() => {});
  }
  /** What is unfolded or scrolled, and stays so where others change the group. */
  const places = () => /** @type {any[]} */ ([...main.querySelectorAll("details, .question, .text")]);
  async function refresh() {
    const read = await app.read(`/groups/${encodeURIComponent(id)}`);
    // a later one was faster; events have numbers of one length
    if (read.last < group.last) return;
    group = read;
    const before = places().map(({ open, scrollTop }) => ({ open, scrollTop }));
    draw();
    places().forEach((element, n) => Object.assign(element, before[n]));
  }
  function focusOn(n) {
    const cards = main.querySelectorAll(".card");
    if (n < 0 || n >= cards.length) return;
    cards[focus]?.removeAttribute("aria-current");
    focus = n;
    cards[n].setAttribute("aria-current", "true");
    cards[n].scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const toggleBlind = () => ((blind = !blind), draw());
  const toggleMarks = () => ((marked = !marked), draw());
  function step(by) {
    const next = order.ids[order.ids.indexOf(id) + by];
    if (next) app.go(next);
    else app.toast(by > 0 ? "That was the last group of the list." : "This is the first group of the list.");
  }
  draw();
  const picks = Object.fromEntries(Array.from({ length: 9 }, (_, n) => [String(n + 1), [n ? "" : "pick an answer: 1 to 9", () => shown()[n] && judge(shown()[n].index)]]));
  return {
    /** Whether something is written that a new drawing would lose. */
    writing: () => editing !== null,
    group(row) {
      if (row.id !== id) return;
      behind = true;
      catchUp();
    },
    keys: {
      ...picks,
      0: ["none is good", () => judge(null)],
      b: ["blind and shuffled, until you have judged", toggleBlind],
      e: ["correct the marked answer", edit],
      u: ["undo your judgement", undo],
      l: ["mark the next answer", () => focusOn(focus + 1)],
      ArrowRight: ["", () => focusOn(focus + 1)],
      h: ["mark the previous answer", () => focusOn(focus - 1)],
      ArrowLeft: ["", () => focusOn(focus - 1)],
      d: ["show or hide differences", toggleMarks],
      o: ["unfold or fold reasoning and tool calls", () => main.querySelectorAll("details").forEach((folded) => folded.toggleAttribute("open"))],
      s: ["save the group as a file", () => save(main, `group ${id.slice(0, 12)}`)],
      j: ["next group", () => step(1)],
      k: ["previous group", () => step(-1)],
      Escape: ["back to the list", () => app.list()],
    },
  };
}

function asked(group) {
  const messages = group.prompt.map((message) => ({ role: String(message.role ?? ""), text: textOf(message) }));
  const last = messages.pop() ?? { role: "", text: "" };
  const earlier = messages.map(({ role, text }) => h("div.message", {}, h("b", {}, role), h("div.text", {}, text)));
  return h("section.question", {}, earlier.length ? h("details", {}, h("summary", {}, `${count(earlier.length, "message")} before`), earlier) : null, h("div.text", {}, last.text || "(no text)"));
}

function textOf(message) {
  const { content } = message;
  const parts = typeof content === "string" ? [content] : Array.isArray(content) ? content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`) : [];
  const calls = [message.tool_calls ?? []].flat().map((call) => `→ ${call?.function?.name ?? "a tool"}(${call?.function?.arguments ?? ""})`);
  return [...parts, ...calls].filter(Boolean).join("\n");
}

function pretty(text) {
  const bare = (json) => json.replace(/\s/g, "");
  try {
    const value = JSON.parse(text);
    // a number of many digits, or a name that is given twice, would be another
    if (bare(JSON.stringify(value)) === bare(text)) return JSON.stringify(value, null, 2);
  } catch {
    // no JSON
  }
  return String(text);
}

/** An order that is the same for one group and one page, and unlike from page to page. */
function shuffle(indices, id) {
  const drawn = () => indices.map((index) => [Math.random(), index]).sort(([a], [b]) => a - b);
  if (!orders.has(id)) orders.set(id, drawn().map(([, index]) => index));
  return orders.get(id);
}
