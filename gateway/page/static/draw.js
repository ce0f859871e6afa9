// Pictures, as SVG whose places are in percent: they fit every width and need no style of their own.
import { number, percent, svg } from "/ui/dom.js";

/** An axis over `values`: low, high, and the place of a value in percent. */
export function scale(values, margin = 3) {
  const finite = values.filter(Number.isFinite);
  let low = finite.length ? Math.min(...finite) : 0;
  let high = finite.length ? Math.max(...finite) : 1;
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const at = (value) => margin + ((100 - 2 * margin) * (value - low)) / (high - low);
  return { low, high, at };
}

/** The digits that tell numbers apart which lie so far from each other. */
const digits = (distance) => Math.min(4, Math.max(2, Math.ceil(-Math.log10(distance))));

/** N answers as dots on a reward axis: filled where the user got it, ringed where somebody picked it. */
export function dots(row, axis, height = 34) {
  const picked = new Set(Object.values(row.picks));
  const stacks = new Map();
  const shapes = row.rewards.flatMap((reward, index) => {
    if (reward === null) return [];
    const x = axis.at(reward);
    const stack = Math.round(x / 2.5);
    const level = stacks.get(stack) ?? 0;
    stacks.set(stack, level + 1);
    const y = height / 2 + [0, -7, 7, -13, 13][level % 5];
    const dot = svg(row.delivered.includes(index) ? "circle.dot.got" : "circle.dot", { cx: `${x}%`, cy: y, r: 4.5 });
    return picked.has(index) ? [svg("circle.pick", { cx: `${x}%`, cy: y, r: 8 }), dot] : [dot];
  });
  const rewards = row.rewards.filter((reward) => reward !== null);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const ends = [low, high].map((reward) => number(reward, digits(high - low)));
  const words = rewards.length ? `${rewards.length} answers with rewards from ${ends[0]} to ${ends[1]}` : "no rewards";
  const zero = axis.low < 0 && axis.high > 0 ? [svg("line.zero", { x1: `${axis.at(0)}%`, x2: `${axis.at(0)}%`, y1: 3, y2: height - 3 })] : [];
  const line = svg("line.axis", { x1: 0, x2: "100%", y1: height / 2, y2: height / 2 });
  return svg("svg.dots", { role: "img", "aria-label": words, height, width: "100%" }, svg("title", {}, words), line, zero, shapes);
}

/** The numbers of an axis. */
export function ticks(axis) {
  const middle = (axis.low + axis.high) / 2;
  const label = (value, anchor) => svg("text.tick", { x: `${axis.at(value)}%`, y: 12, "text-anchor": anchor }, number(value, digits(middle - axis.low)));
  return svg("svg.dots", { height: 16, width: "100%", "aria-hidden": "true" }, label(axis.low, "start"), label(middle, "middle"), label(axis.high, "end"));
}

const WIDTH = 720;
const HEIGHT = 260;
const LEFT = 46;
const BOTTOM = 28;

/** Lines over steps; `series` are {name, kind, points: [{step, value, error?}]}; a point is drawn with what it may be off by. */
export function curve(series, title) {
  const points = series.flatMap((line) => line.points);
  const steps = points.map((point) => point.step);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const values = points.flatMap((point) => [point.value - (point.error ?? 0), point.value + (point.error ?? 0)]);
  const { low, high } = scale(values);
  const x = (step) => LEFT + ((WIDTH - LEFT - 12) * (step - first)) / Math.max(1, last - first);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - 14) * (value - low)) / (high - low);
  const shapes = [];
  for (let n = 0; n <= 4; n++) {
    const value = low + ((high - low) * n) / 4;
    shapes.push(svg("line.grid", { x1: LEFT, x2: WIDTH - 12, y1: y(value), y2: y(value) }));
    shapes.push(svg("text.tick", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, number(value, digits((high - low) / 4))));
  }
  const each = Math.max(1, Math.ceil((last - first) / 8));
  for (let step = first; step <= last; step += each)
    shapes.push(svg("text.tick", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, String(step)));
  for (const { kind, points: line, name } of series) {
    if (!line.length) continue;
    const known = line.filter((point) => Number.isFinite(point.error));
    if (known.length > 1) {
      const edge = [...known.map((p) => [p.step, p.value + p.error]), ...known.reverse().map((p) => [p.step, p.value - p.error])];
      shapes.push(svg(`polygon.band.${kind}`, { points: edge.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }));
    }
    shapes.push(svg(`polyline.line.${kind}`, { points: line.map((p) => `${x(p.step)},${y(p.value)}`).join(" ") }));
    for (const point of line.length <= 60 ? line : line.slice(-1))
      shapes.push(svg(`circle.point.${kind}`, { cx: x(point.step), cy: y(point.value), r: 3.2 }, svg("title", {}, `${name}, step ${point.step}: ${number(point.value, 3)}`)));
  }
  return svg("svg.curve", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, svg("title", {}, title), shapes);
}

/** Columns of shares, 0 to 1, over steps. */
export function columns(points, title) {
  const [first, last] = [points[0].step, points[points.length - 1].step];
  const width = (WIDTH - LEFT - 12) / (last - first + 1);
  const shapes = points.map(({ step, value }) =>
    svg("rect.column", { x: LEFT + width * (step - first) + 1, width: Math.max(1, width - 2), y: 80 - 70 * value, height: Math.max(1, 70 * value) }, svg("title", {}, `step ${step}: ${percent(value)}`)),
  );
  const label = (y, text) => svg("text.tick", { x: LEFT - 8, y, "text-anchor": "end" }, text);
  return svg("svg.curve", { viewBox: `0 0 ${WIDTH} 92`, role: "img", "aria-label": title }, label(16, "100 %"), label(84, "0 %"), shapes);
}

/** An interval on an axis from `low` to `high`, with a mark (`zero`) to compare it with. */
export function interval(mean, from, to, low, high, zero, words) {
  const at = (value) => `${2 + (96 * (Math.min(high, Math.max(low, value)) - low)) / (high - low)}%`;
  const mark = zero === null ? [] : [svg("line.zero", { x1: at(zero), x2: at(zero), y1: 2, y2: 30 })];
  return svg(
    "svg.dots",
    { height: 46, width: "100%", role: "img", "aria-label": words },
    svg("line.axis", { x1: "2%", x2: "98%", y1: 16, y2: 16 }),
    mark,
    svg("line.range", { x1: at(from), x2: at(to), y1: 16, y2: 16 }),
    Number.isFinite(mean) ? svg("circle.dot.got", { cx: at(mean), cy: 16, r: 5.5 }) : null,
    svg("text.tick", { x: "2%", y: 44 }, number(low)),
    zero === null ? null : svg("text.tick", { x: at(zero), y: 44, "text-anchor": "middle" }, number(zero)),
    svg("text.tick", { x: "98%", y: 44, "text-anchor": "end" }, number(high)),
  );
}

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_WORDS = 900;

/** The words of `text`, each with whether `base` lacks it there (longest common subsequence); whole where too long. */
export function differences(text, base) {
  const [words, others] = [text.match(WORDS) ?? [], base.match(WORDS) ?? []];
  if (text === base || words.length > MOST_WORDS || others.length > MOST_WORDS) return [[text, false]];
  const width = others.length + 1;
  const lengths = new Uint16Array((words.length + 1) * width);
  for (let i = words.length - 1; i >= 0; i--)
    for (let j = others.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        words[i] === others[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  // where hardly anything is shared, marks would say nothing
  if (lengths[0] < 0.5 * words.length) return [[text, false]];
  const parts = [];
  for (let i = 0, j = 0; i < words.length; i++) {
    while (j < others.length && words[i] !== others[j] && lengths[i * width + j + 1] > lengths[(i + 1) * width + j]) j++;
    const same = j < others.length && words[i] === others[j];
    if (same) j++;
    const blank = !words[i].trim();
    const before = parts[parts.length - 1];
    if (before && (before[1] === !same || (blank && before[1]))) before[0] += words[i];
    else parts.push([words[i], !same && !blank]);
  }
  // the blank behind a difference is none
  return parts.flatMap(([part, differs]) => (differs ? [[part.trimEnd(), true], [part.slice(part.trimEnd().length), false]] : [[part, false]]));
}
