"use strict";
// Elements, number formats and plots. Text only ever enters the page as text nodes: model output is not trusted.

window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
const DATA = JSON.parse(document.getElementById("data").textContent); // of a live page it comes later
const SVG_NS = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (key.startsWith("aria-")) node.setAttribute(key, String(value)); // true and false are words there
    else if (value === null || value === undefined || value === false) continue;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.entries(value).forEach(([name, text]) => node.style.setProperty(name, text));
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS(SVG_NS, tag), props, children);
const color = (name) => `var(--${name})`;

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const format = {
  number(x) {
    if (!isNumber(x)) return "–";
    const size = Math.abs(x);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e7) return x.toExponential(1).replaceAll("-", "−").replace("+", "");
    if (size >= 999.5) return Math.round(x).toLocaleString("en-US");
    return format.fixed(x, size >= 100 ? 0 : size >= 10 ? 1 : 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  },
  fixed: (x, digits) => (isNumber(x) ? x.toFixed(digits).replace("-", "−") : "–"),
  percent(x) {
    if (!isNumber(x)) return "–";
    return (100 * x).toFixed(Math.abs(x) < 0.0995 && x !== 0 ? 1 : 0) + " %";
  },
  percent1: (x) => (isNumber(x) ? (100 * x).toFixed(1) + " %" : "–"),
  seconds(x) {
    if (!isNumber(x)) return "–";
    if (x < 60) return x < 0.0995 ? `${(1000 * x).toFixed(x < 0.00995 ? 1 : 0)} ms` : `${x.toFixed(1)} s`;
    const minutes = Math.floor(Math.round(x) / 60), hours = Math.floor(minutes / 60);
    if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
    return hours ? `${hours} h ${String(minutes % 60).padStart(2, "0")} m` : `${minutes} m ${String(Math.round(x) % 60).padStart(2, "0")} s`;
  },
  count(x) {
    if (!isNumber(x)) return "–";
    for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (x >= size) return `${(x / size).toFixed(x < 10 * size ? 2 : 1)} ${unit}`;
    return String(Math.round(x));
  },
  interval: (ci) => (ci ? `${(100 * ci[0]).toFixed(0)}–${(100 * ci[1]).toFixed(0)}` : ""),
};

// What all plots share: the steps, where the pointer is, how much is averaged.
const VIEW = { steps: [], marks: [], at: null, smooth: 1, plots: [] }; // marks: steps of evaluations
const column = (name) => DATA.series.values[name];
const last = (values) => { for (let i = (values || []).length - 1; i >= 0; i--) if (isNumber(values[i])) return values[i]; return null; };

/** Mean over a window of `n` points around each one; gaps stay gaps. */
function smoothed(values, n) {
  if (n <= 1) return values;
  const half = n >> 1, sums = [0], counts = [0];
  values.forEach((v, i) => { sums.push(sums[i] + (isNumber(v) ? v : 0)); counts.push(counts[i] + (isNumber(v) ? 1 : 0)); });
  return values.map((v, i) => {
    if (!isNumber(v)) return null;
    const reach = Math.min(half, i, values.length - 1 - i), a = i - reach, b = i + reach + 1; // symmetric, so that ends do not lean
    return (sums[b] - sums[a]) / (counts[b] - counts[a]);
  });
}

function quantile(sorted, q) {
  const at = q * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

function xDomain() {
  let low = Infinity, high = -Infinity;
  for (const step of [...VIEW.steps, ...VIEW.marks]) { low = Math.min(low, step); high = Math.max(high, step); }
  return low === high ? [low - 1, high + 1] : low < high ? [low, high] : [0, 1];
}

/** Limits of a panel's y axis. */
function limits(panel, all, log) {
  const known = all.filter((v) => isNumber(v) && (!log || v > 0)).sort((a, b) => a - b);
  let [low, high] = known.length ? [known[0], known[known.length - 1]] : [0, 1];
  if (log) {
    const wider = Math.max(0.05 * Math.log10(high / low), (1 - Math.log10(high / low)) / 2); // at least a decade
    return [low / 10 ** wider, high * 10 ** wider];
  }
  if (panel.robust && known.length > 20) { // a few spikes must not flatten the rest; they are marked at the edge
    const q1 = quantile(known, 0.02), q9 = quantile(known, 0.98), reach = 1.5 * (q9 - q1);
    if (reach > 0) { high = Math.min(high, q9 + reach); low = Math.max(low, q1 - reach); }
  }
  if (panel.zero) { low = Math.min(0, low); high = Math.max(0, high); }
  if (panel.include) { low = Math.min(low, ...panel.include); high = Math.max(high, ...panel.include); }
  const fixed = panel.zero && low === 0, pad = low === high ? Math.abs(low) * 0.5 || 0.5 : (high - low) * 0.06;
  [low, high] = [fixed ? low : low - pad, high + pad];
  return panel.percent ? [Math.max(0, low), Math.min(1.02, high)] : [low, high];
}
function decades(u, axis, low, high) {
  const span = Math.log10(high / low), every = Math.max(1, Math.ceil(span / 5)), out = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += every) for (const m of span < 2 ? [1, 2, 5] : [1]) out.push(m * 10 ** power);
  return out.filter((v) => v >= low && v <= high);
}
function tickLabel(panel, log, value, step, most) {
  if (log) {
    const power = Math.floor(Math.log10(value) + 1e-9), lead = Math.round(value / 10 ** power);
    return `${lead === 1 ? "" : `${lead}·`}10` + String(power).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  }
  if (panel.percent) return (100 * value).toFixed(step < 0.0099 ? (step < 0.00099 ? 2 : 1) : 0) + " %";
  if (Math.abs(value) < 1e-12) return "0";
  if (most >= 1e4) return (value < 0 ? "−" : "") + format.count(Math.abs(value)).replace(" ", "").replace(/\.0+(?=\D|$)/, "");
  if (most < 1e-2) return format.number(value).replace(".0e", "e");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace("-", "−");
}

/** A colour of the style sheet as a canvas takes it. */
const tint = (name, alpha = 1) => () => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() + Math.round(255 * alpha).toString(16).padStart(2, "0");
const STEPS = [...Array(24).keys()].flatMap((power) => [1, 2, 5].map((m) => m * 10 ** (power - 12)));
const FONT = "11px system-ui, sans-serif";
/** Points without neighbours, which no line shows. */
const lonely = (u, i) => [...u.data[i].keys()].filter((k) => isNumber(u.data[i][k]) && !isNumber(u.data[i][k - 1]) && !isNumber(u.data[i][k + 1]));
/** The one point of a line that has no more. */
const single = (u, i) => { const known = [...u.data[i].keys()].filter((k) => isNumber(u.data[i][k])); return known.length > 1 ? [] : known; };

/** A card of one or more panels over the same steps, drawn by uPlot. Series kinds: line, band, stack, points. */
class Plot {
  constructor(spec) {
    this.spec = spec;
    this.name = `${spec.title} ${spec.panels.length}`;
    this.panels = spec.panels.map((panel) => ({ panel, legend: el("div", { class: "legend" }), host: el("div", { class: "panel", role: "img", tabindex: "0", "aria-label": this.describe(panel), onkeydown: (e) => this.onKey(e) }) }));
    this.node = el("article", { class: "card plot" }, el("h3", {}, spec.title), spec.note && el("p", { class: "lead" }, spec.note));
    this.empty = !spec.panels.some((panel) => panel.series.some((s) => values(s).some(isNumber)));
    if (this.empty) return;
    this.node.append(...this.panels.flatMap(({ legend, host }) => [legend, host]));
    new ResizeObserver(() => { if (this.panels[0].host.clientWidth !== this.width) this.draw(); }).observe(this.panels[0].host);
  }

  /** Newer values of the same panels. */
  take(spec) {
    this.spec = spec;
    this.panels.forEach((place, i) => { place.panel = spec.panels[i]; });
  }
  draw() {
    if (this.empty) return;
    this.width = this.panels[0].host.clientWidth;
    if (!this.width) return;
    this.panels.forEach((place, i) => this.drawPanel(place, i === 0, i === this.panels.length - 1));
    this.readOut();
    if (VIEW.at !== null && VIEW.steps.length) this.panels[0].u.setCursor({ left: this.panels[0].u.valToPos(VIEW.at, "x"), top: 1 }, false);
  }
  onKey(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key], u = this.panels[0].u;
    if (!by || !VIEW.steps.length) return;
    event.preventDefault();
    const i = VIEW.at === null ? (by > 0 ? -1 : VIEW.steps.length) : nearest(VIEW.steps, VIEW.at);
    u.setCursor({ left: u.valToPos(VIEW.steps[Math.max(0, Math.min(VIEW.steps.length - 1, i + by))], "x"), top: 1 }, true, true);
  }
  describe(panel) {
    const main = panel.series.find((s) => s.kind !== "band") || panel.series[0], all = main ? values(main).filter(isNumber) : [];
    const show = panel.format || (panel.percent ? format.percent : format.number);
    return `${this.spec.title}, ${panel.unit}: ${all.length ? `${main.name} from ${show(all[0])} to ${show(all[all.length - 1])}` : "no values"}`;
  }

  drawPanel(place, first, lowest) {
    const { panel, host } = place, all = panel.series.flatMap((s) => (s.kind === "stack" ? s.total : values(s)));
    const log = Boolean(panel.log) && all.some((v) => v > 0), [low, high] = limits(panel, all, log);
    const label = (u, splits) => splits.map((v) => tickLabel(panel, log, v, splits[1] - splits[0], Math.max(Math.abs(low), Math.abs(high))));
    const { data, series, bands } = columns(panel);
    const dot = (u, i) => series[i].hover && el("div", { class: "dot", style: { background: color(series[i].hover) } });
    if (place.u) place.u.destroy();
    host.replaceChildren();
    place.u = new uPlot({
      width: this.width, height: (panel.height || 170) + (lowest ? 36 : 6), padding: [16, 12, lowest ? 0 : 6, 0], series, bands, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "steps" }, points: { show: dot } },
      scales: { x: { time: false, range: xDomain }, y: { distr: log ? 3 : 1, range: [low, high] } },
      axes: [
        { show: lowest, size: 36, gap: 4, space: 90, incrs: STEPS, font: FONT, stroke: tint("faint"), grid: { show: false }, ticks: { show: false }, border: { show: true, stroke: tint("line"), width: 1 }, values: (u, splits) => splits.map((v) => (Number.isInteger(v) ? v.toLocaleString("en-US") : "")) },
        { size: 48, gap: 7, space: panel.height < 100 ? 18 : 34, incrs: STEPS, font: FONT, stroke: tint("faint"), grid: { stroke: tint("grid"), width: 1 }, ticks: { show: false }, values: label, ...(log ? { splits: decades } : {}) },
      ],
      hooks: { ready: [(u) => u.over.append(this.overlay(u, panel, log, first, lowest))], setCursor: [(u) => setAt(u.cursor.left < 0 || !isNumber(u.cursor.idx) ? null : u.data[0][u.cursor.idx])] },
    }, data, host);
  }

  /** What uPlot has no series for: the unit, resumes and alarms, evaluations with their intervals, spikes. */
  overlay(u, panel, log, first, lowest) {
    const width = u.over.clientWidth, height = u.over.clientHeight, root = svg("svg", { class: "overlay", width, height });
    const x = (step) => u.valToPos(step, "x"), y = (value) => u.valToPos(value, "y"), unit = panel.unit + (log ? ", log scale" : "");
    let free = 6 * unit.length - 18; // about where the next label may begin
    root.append(svg("text", { class: "unit", x: -48, y: -7 }, unit));
    if (lowest) root.append(svg("text", { class: "unit", x: width, y: height + 31, "text-anchor": "end" }, "optimizer step"));
    const mark = (step, kind, text, title) => {
      root.append(svg("line", { class: `mark ${kind}`, x1: x(step), x2: x(step), y1: 0, y2: height }, svg("title", {}, title)));
      if (!first || x(step) < free) return;
      root.append(svg("text", { class: kind, x: x(step), y: -7, "text-anchor": "middle" }, text));
      free = x(step) + 60;
    };
    (DATA.resumed || []).forEach((step) => mark(step, "", "resumed", `resumed from step ${step}`));
    this.alarms().forEach((alarm) => mark(alarm.step, "alarm", "alarm", `alarm ${alarm.alarm} at step ${alarm.step}`));
    for (const s of panel.series) {
      if (s.kind === "points") this.points(root, s, x, y);
      else if (panel.robust && s.kind !== "band") this.spikes(root, s, x, y, height);
    }
    return root;
  }
  /** Alarms that looked at one of the metrics drawn here. */
  alarms() {
    const here = this.spec.panels.flatMap((panel) => panel.series.flatMap((s) => [s.metric, ...(s.parts || []).map((part) => part.metric)]));
    return (DATA.alarms || []).filter((alarm) => (alarm.metrics || []).some((name) => here.includes(name)));
  }
  points(root, s, x, y) {
    const at = s.x.map((step) => x(step) + (s.shift || 0)), style = { stroke: color(s.color) };
    root.append(svg("path", { class: "strong", d: "M" + at.map((x, i) => `${x} ${y(s.y[i])}`).join("L"), style: { ...style, "stroke-width": "1.5", opacity: ".55" } }));
    at.forEach((x, i) => {
      if (s.ci[i]) root.append(svg("path", { class: "strong", d: `M${x} ${y(s.ci[i][0])}V${y(s.ci[i][1])}m-4 0h8M${x - 4} ${y(s.ci[i][0])}h8`, style }));
      root.append(svg("circle", { cx: x, cy: y(s.y[i]), r: 4, style: { fill: color(s.color), stroke: "var(--card)", "stroke-width": "1.5" } }));
    });
  }
  spikes(root, s, x, y, height) {
    (s.kind === "stack" ? s.total : s.y).forEach((v, i) => {
      if (!isNumber(v) || (y(v) >= -1 && y(v) <= height + 1)) return;
      const [edge, h] = y(v) < 0 ? [-2, 5] : [height + 2, -5];
      root.append(svg("path", { d: `M${x(VIEW.steps[i]) - 3} ${edge + h}h6l-3 ${-h}z`, style: { fill: color(s.color || "grey") } }, svg("title", {}, `step ${VIEW.steps[i]}: ${format.number(v)}, off the scale`)));
    });
  }

  readOut() {
    const i = VIEW.at === null ? null : nearest(VIEW.steps, VIEW.at);
    for (const { panel, legend } of this.panels) {
      const show = panel.format || (panel.percent ? format.percent : format.number), read = (ys) => show(i === null ? last(ys) : ys[i]), keys = [];
      let evaluated = null;
      for (const s of panel.series) {
        if (s.kind === "stack") for (const part of s.parts) keys.push(key(part.name, part.color, "area", read(part.y)));
        else if (s.kind === "band") keys.push(key(s.name, s.color, "area", `${read(s.lo)} … ${read(s.hi)}`, Boolean(s.faint)));
        else if (s.kind === "line") keys.push(key(s.name, s.color, "line", read(s.y)));
        else {
          const e = VIEW.at === null ? s.x.length - 1 : nearest(s.x, VIEW.at);
          evaluated = s.x[e];
          keys.push(key(s.name, s.color, "dot", `${format.percent1(s.y[e])}${s.ci[e] ? ` (${format.interval(s.ci[e])})` : ""}`));
        }
      }
      if (evaluated !== null) keys.push(el("span", {}, `at step ${evaluated}`));
      legend.replaceChildren(...keys);
    }
  }
}

/** The columns of a panel as uPlot takes them. */
function columns(panel) {
  const xs = VIEW.steps.length ? VIEW.steps : [...new Set(VIEW.marks)];
  const data = [xs], series = [{}], bands = [], smooth = (ys) => smoothed(ys, VIEW.smooth);
  const add = (ys, options) => { data.push(ys); return series.push({ points: { show: false }, pxAlign: 0, ...options }) - 1; };
  for (const s of panel.series) {
    if (s.kind === "line") {
      if (VIEW.smooth > 1) add(s.y, { stroke: tint(s.color, 0.35), width: 1, dash: s.dash, spanGaps: s.span });
      const stroke = tint(s.color, s.faint ? 0.75 : 1), points = { show: true, filter: s.span ? single : lonely, size: s.span ? 6 : 3, fill: stroke };
      add(smooth(s.y), { stroke, width: s.faint ? 1.25 : 2, dash: s.dash, hover: s.color, points, spanGaps: s.span });
    } else if (s.kind === "band") {
      const lo = add(smooth(s.lo)), hi = add(smooth(s.hi));
      bands.push({ series: [hi, lo], fill: tint(s.color, s.faint ? 0.1 : 0.22) });
    } else if (s.kind === "stack") {
      let sum = xs.map(() => 0);
      const tops = s.parts.map((part) => { const ys = s.bars ? part.y : smooth(part.y); sum = sum.map((v, i) => v + (ys[i] || 0)); return [sum, part.color]; });
      if (s.bars) tops.reverse().forEach(([ys, name]) => add(ys, { fill: tint(name), width: 0, paths: uPlot.paths.bars({ size: [0.7, 14] }) })); // counts: nothing lies between two steps
      else tops.reduce((below, [ys, name]) => { const at = add(ys); bands.push({ series: [at, below], fill: tint(name, 0.82) }); return at; }, add(xs.map(() => 0)));
    }
  }
  return { data, series, bands };
}

const values = (s) => (s.kind === "band" ? [...s.lo, ...s.hi] : s.kind === "stack" ? s.total : s.kind === "points" ? [...s.y, ...s.ci.flatMap((c) => c || [])] : s.y);

function key(name, tint, shape, value, faint) {
  return el("span", { class: "key" }, el("i", { class: shape, style: { background: color(tint), opacity: faint === undefined ? "1" : faint ? ".2" : ".45" } }), name, value ? el("b", {}, value) : null);
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : sorted.length ? low : -1;
}

let queued = false;
function setAt(step) {
  VIEW.at = step;
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const i = VIEW.at === null ? -1 : nearest(VIEW.steps, VIEW.at);
    const at = document.getElementById("at");
    if (at) at.textContent = i >= 0 ? `step ${VIEW.steps[i]}` : "";
    VIEW.plots.forEach((plot) => plot.readOut());
  });
}

/** A tiny line without axes. */
function sparkline(ys, tint, width = 120, height = 22) {
  const known = ys.filter(isNumber), low = Math.min(...known), high = Math.max(...known);
  const x = (i) => 2 + (i / Math.max(1, ys.length - 1)) * (width - 4), y = (v) => (high === low ? height / 2 : height - 3 - ((v - low) / (high - low)) * (height - 6));
  let d = "", pen = false;
  ys.forEach((v, i) => { if (isNumber(v)) d += `${pen ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`; pen = isNumber(v); });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "strong", d: d || "M0 0", style: { stroke: color(tint), "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" } }));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => VIEW.plots.forEach((plot) => plot.draw()));
