// Two screens of figures: is it learning, and which policies compete.
import { ask } from "/ui/api.js";
import { columns, curve, interval } from "/ui/draw.js";
import { age, confirm, count, empty, h, number, panel, percent, save, show, span } from "/ui/dom.js";

const keysOf = (app, main, name) => ({ r: ["read anew", () => app.refresh()], s: ["save this as a file", () => save(main, name)] });

const head = (title, main, name) => h("div.crumbs", {}, h("h1", {}, title), h("button.quiet", { onclick: () => save(main, name) }, "Save as a file"));

/** The screen under `#/learning`. */
export async function openLearning(main, app) {
  const answer = await app.read("/learning");
  const servers = answer.servers.map((server) => serverPanel(server, answer.servers));
  show(main, head("Is it learning?", main, "learning"), servers, agreementPanel(answer), routesPanel(answer), answer.servers.length ? null : empty("No route has a swarm server", "Give a route a swarm_url: nothing is trained without one."));
  return { keys: keysOf(app, main, "learning"), every: 10 };
}

const series = (server) => server.steps.filter((step) => step.reward !== undefined).map((step) => ({ step: step.step, value: step.reward, error: step.error }));

function serverPanel(server, servers) {
  const title = servers.length > 1 ? `${server.control ? "Control: rewards shuffled" : "Reward"}, ${server.url}` : server.control ? "Control: rewards shuffled, so what it gains is chance" : "Reward per training step";
  const control = server.control ? [] : servers.filter((other) => other.control).flatMap(series);
  const problem = server.problem ? h("p.note.warn", {}, server.at ? `${server.problem}. What you see is the last that is known.` : `Nothing is known of the swarm server: ${server.problem}`) : null;
  if (!server.steps.length)
    return panel(title, server.at, problem, empty("No step yet", server.at ? `Now: ${server.doing}. A step is trained as soon as there are enough groups for a batch; each group appears under Groups first.` : "It appears here when the server answers."));
  const reward = series(server);
  const held = server.evaluations.map((evaluation) => ({ step: evaluation.step, value: evaluation.reward }));
  const signal = server.steps.filter((step) => step.groups).map((step) => ({ step: step.step, value: (step.signal ?? 0) / step.groups }));
  return [
    panel(
      title,
      server.at,
      problem,
      server.learning ? h("p.figure", {}, h("b", {}, server.learning)) : null,
      reward.length ? curve([{ name: "training", kind: "train", points: reward }, { name: "held out", kind: "held", points: held }, { name: "control", kind: "control", points: control }], "Mean reward per step, with its 95 % interval, and of held-out tasks") : null,
      h("p.key", {}, h("span.swatch.train", {}), "training, with its 95 % interval ", control.length ? [h("span.swatch.control", {}), "control, rewards shuffled, with its own "] : null, held.length ? [h("span.swatch.held", {}), "held out"] : "· no held-out tasks: give `eval` to `train` to see whether it generalizes"),
      server.warnings.length ? [h("h3", {}, "What the engine warns of"), h("ul", {}, server.warnings.map((text) => h("li", {}, text)))] : null,
    ),
    signal.length ? panel("Groups with signal", server.at, h("p.figure", {}, h("b", {}, percent(signal[signal.length - 1].value)), " of the last step's groups have rewards that differ. Groups with equal rewards teach nothing."), columns(signal, "Share of groups whose rewards differ, per step")) : null,
  ];
}

function agreementPanel(answer) {
  const { share, low, high, chance, compared, judged } = answer.agreement;
  const title = "The hook's report card";
  if (!compared) return panel(title, answer.at, h("p", {}, judged ? `${count(judged, "judgement")} so far, none of a group whose rewards differ.` : "Nobody has judged a group yet. Open one under Groups and press the number of the best answer, or b first to judge blind."));
  const words = `People pick an answer that the hook likes best in ${percent(share)} of ${count(compared, "group")}; 95 % interval ${percent(low)} to ${percent(high)}.`;
  const verdict = low > chance ? "The hook knows what people like, better than chance." : high < chance ? "The hook likes what people do not: look at it before you train on." : "Too few judgements to tell the hook from chance.";
  return panel(title, answer.at, h("p.figure", {}, h("b", {}, percent(share)), ` of ${count(compared, "group")} agree, ${percent(low)} to ${percent(high)} (95 %); by chance ${percent(chance)}.`), interval(share, low, high, 0, 1, chance, words), h("p", {}, verdict));
}

function routesPanel(answer) {
  const rows = answer.routes.map((route) => {
    const waits = answer.waits[route.name];
    const failed = Object.values(route.hook_failures).reduce((sum, n) => sum + n, 0);
    const { groups, with_signal, reward, spread } = route.recent;
    return h("tr", {}, h("th", { scope: "row" }, route.name), h("td", {}, String(route.requests)), h("td", {}, groups ? number(reward / groups, 3) : "–"), h("td", {}, groups ? number(spread / groups, 3) : "–"), h("td", {}, groups ? percent(with_signal / groups) : "–"), h("td", { class: failed ? "bad" : null }, String(failed)), h("td", {}, waits ? span(waits.half) : "–"), h("td", {}, waits ? span(waits.most) : "–"));
  });
  const errors = answer.routes.flatMap((route) => Object.entries(route.hook_errors).map(([text, n]) => h("li", {}, `${route.name}, ${count(n, "time")}: ${text}`)));
  const names = ["Route", "Requests", "Reward", "Spread", "With signal", "Hook failed", "Half waited", "95 % waited"];
  return panel("Routes, since the gateway's start", answer.at, h("div.wide", {}, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))), errors.length ? [h("h3", {}, "What the hooks failed of"), h("ul", {}, errors)] : null, h("p.note", {}, "Reward, spread and signal are of the latest 100 groups of each route. Waits last until the end of the response, at most."));
}

/** The screen under `#/policies`. */
export async function openPolicies(main, app) {
  const answer = await app.read("/learning");
  const compared = answer.servers.flatMap((server) => (server.comparisons ?? []).map((comparison) => ({ ...comparison, at: server.at })));
  const routes = answer.routes.map((route) => {
    const server = answer.servers.find(({ url }) => url === route.server);
    const stages = (server?.stages ?? []).filter((stage) => stage.route === route.name).map((stage) => stageOf(stage, app));
    const stage = route.stage ? (stages.length ? stages : "The incumbent answers everybody; the swarm server knows no stage yet.") : server ? "The trained model answers everybody." : "An upstream answers; nothing is trained.";
    const verdicts = compared.filter((comparison) => comparison.route === route.name).map(verdictOf);
    return panel(route.name, answer.at, h("div", {}, stage), server?.at ? h("p.note", {}, `Weights of step ${server.step} of ${server.model || "no model"}, ${route.trained} groups trained since the gateway's start.`) : null, server?.problem ? h("p.note.warn", {}, server.problem) : null, verdicts, route.stage && !verdicts.length ? h("p", {}, "No pair is judged yet: each request that both sides answer is one.") : null);
  });
  show(main, head("Policies", main, "policies"), routes, routes.length && !compared.length && !answer.routes.some((route) => route.stage) ? h("p.note", {}, "No route compares its policy with another one. ", h("code", {}, "serve"), " in a route's settings puts the trained model behind an incumbent until it has proven itself.") : null);
  return { keys: keysOf(app, main, "policies"), every: 10 };
}

/** Where a challenger stands, and what a person may do about it. */
function stageOf(stage, app) {
  const who = stage.share === 0 ? "The incumbent answers everybody; the challenger learns behind it." : stage.share === 1 ? "The challenger answers everybody; the incumbent is asked behind it." : `The challenger answers ${percent(stage.share)} of the conversations.`;
  const moves = [
    stage.next === null ? null : ["promote", stage.next === 1 ? "Promote to all users" : `Promote to ${percent(stage.next)}`],
    stage.share > 0 ? ["rollback", "Roll back"] : null,
    stage.pinned ? ["unpin", "Let verdicts move it"] : ["pin", "Pin"],
  ].filter(Boolean);
  return [
    h("p", {}, h("span.tag.open", {}, stage.label), stage.pinned ? h("span.tag.warn", {}, "pinned") : null, ` ${who}${stage.trial ? " Training waits for the verdict." : ""}`),
    h("p.note", {}, `By ${stage.by}: ${stage.why} · `, age(stage.at), stage.pinned ? ` · Pinned by ${stage.pinned_by}: ${stage.pinned_why}` : null),
    app.me.scope === "decide" && !app.me.keyless ? h("p.moves", {}, moves.map(([move, words]) => h("button", { onclick: () => decide(stage, move, words, app) }, words))) : null,
  ];
}

/** Ask why, and move the challenger. */
function decide(stage, move, words, app) {
  const reason = h("input", { "aria-label": "the reason, which is kept", placeholder: "Why? The reason is kept.", maxlength: 1000, required: true });
  const send = async () => {
    const { route, incumbent, version } = stage;
    const done = await ask("/move", "POST", { move, route, incumbent, version, reason: reason.value.trim() });
    app.toast(`${stage.route} is ${done.stage.share === 0 ? "in the shadow" : done.stage.share === 1 ? "live" : `at ${percent(done.stage.share)}`}${done.stage.pinned ? ", pinned" : ""}.`);
    app.refresh();
  };
  confirm(`${words}: ${stage.route}`, words, send, reason);
}

function verdictOf({ incumbent, challenger, verdict, at }) {
  const reach = 1.15 * Math.max(0.04, Math.abs(verdict.low), Math.abs(verdict.high));
  const marks = [...Object.entries(verdict.suites).map(([name, finding]) => `${name}: ${finding.replaceAll("_", " ")}`), ...verdict.guards.map((name) => `worse ${name}`)];
  return h(
    "div.verdict",
    {},
    h("h3", {}, `${challenger === null ? "the challenger" : `step ${challenger}`} against ${incumbent}`),
    h("p", {}, h(`span.tag.${verdict.promotable ? "good" : verdict.finding === "worse" ? "bad" : "warn"}`, {}, verdict.finding.replaceAll("_", " ")), ` ${verdict.sentence}`),
    interval(verdict.difference, verdict.low, verdict.high, -reach, reach, 0, verdict.sentence),
    h("p.note", {}, `${count(verdict.requests, "request")} that both answered, ${verdict.unjudged} not judged${marks.length ? ` · ${marks.join(" · ")}` : ""} · `, age(at, "as of ")),
  );
}
