"use strict";
// Elements, number formats and plots. Text only ever enters the page as text nodes: model output is not trusted.

window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
const DATA = JSON.parse(document.getElementById("data").textContent);
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
const VIEW = { steps: DATA.series.steps, at: null, smooth: 1, plots: [] };
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

function niceStep(span, count) {
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw)), unit = raw / power;
  return power * (unit <= 1 ? 1 : unit <= 2 ? 2 : unit <= 5 ? 5 : 10);
}

function xDomain() {
  const all = [...VIEW.steps, ...DATA.evaluations.map((e) => e.step)];
  let low = Infinity, high = -Infinity;
  for (const step of all) { low = Math.min(low, step); high = Math.max(high, step); }
  return low === high ? [low - 1, high + 1] : [low, high];
}

/** The y axis of a panel: domain, ticks and a function to pixels. */
class Scale {
  constructor(panel, values, top, bottom) {
    this.panel = panel; this.top = top; this.bottom = bottom;
    let known = values.filter(isNumber);
    this.log = Boolean(panel.log) && known.some((v) => v > 0);
    if (this.log) known = known.filter((v) => v > 0);
    known.sort((a, b) => a - b);
    if (!known.length) known = [0, 1];
    [this.low, this.high] = this.log ? this.decades(known) : this.linear(known);
  }
  linear(known) {
    let low = known[0], high = known[known.length - 1];
    if (this.panel.robust && known.length > 20) { // a few spikes must not flatten the rest; they are marked at the edge
      const q1 = quantile(known, 0.02), q9 = quantile(known, 0.98), reach = 1.5 * (q9 - q1);
      if (reach > 0) { high = Math.min(high, q9 + reach); low = Math.max(low, q1 - reach); }
    }
    if (this.panel.zero) { low = Math.min(0, low); high = Math.max(0, high); }
    if (this.panel.include) { low = Math.min(low, ...this.panel.include); high = Math.max(high, ...this.panel.include); }
    if (low === high) { const pad = Math.abs(low) * 0.5 || 0.5; if (!(this.panel.zero && low === 0)) low -= pad; high += pad; }
    const pad = (high - low) * 0.06;
    if (!(this.panel.zero && low === 0)) low -= pad;
    high += pad;
    if (this.panel.percent) { low = Math.max(0, low); high = Math.min(1.02, high); }
    return [low, high];
  }
  decades(known) {
    let low = Math.log10(known[0]), high = Math.log10(known[known.length - 1]);
    if (high - low < 1) { const middle = (low + high) / 2; low = middle - 0.5; high = middle + 0.5; }
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  }
  y(value) {
    const v = this.log ? Math.log10(Math.max(value, 1e-300)) : value;
    return this.bottom - ((v - this.low) / (this.high - this.low)) * (this.bottom - this.top);
  }
  ticks() {
    const room = Math.max(2, Math.floor((this.bottom - this.top) / 34)), out = [];
    if (this.log) {
      const decades = this.high - this.low, step = Math.max(1, Math.ceil(decades / room)), within = decades < 2 ? [1, 2, 5] : [1];
      for (let i = Math.floor(this.low / step); i * step <= this.high; i++) for (const m of within) out.push(m * 10 ** (i * step));
      return out.filter((v) => Math.log10(v) >= this.low && Math.log10(v) <= this.high).map((v) => [v, this.label(v)]);
    }
    let step;
    for (let more = 0; more < 6 && out.length < 2; more++) { // a low panel still needs two
      step = niceStep(this.high - this.low, room + more);
      out.length = 0;
      for (let i = Math.ceil(this.low / step - 1e-9); i * step <= this.high + 1e-12; i++) out.push(i * step);
    }
    return out.map((v) => [v, this.label(v, step)]);
  }
  label(value, step) {
    if (this.log) {
      const power = Math.floor(Math.log10(value) + 1e-9), lead = Math.round(value / 10 ** power);
      return `${lead === 1 ? "" : `${lead}·`}10` + String(power).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    }
    if (this.panel.percent) return (100 * value).toFixed(step < 0.0099 ? (step < 0.00099 ? 2 : 1) : 0) + " %";
    if (Math.abs(value) < 1e-12) return "0";
    const size = Math.max(Math.abs(this.low), Math.abs(this.high));
    if (size >= 1e4) return format.count(Math.abs(value)).replace(" ", "").replace(/\.0+(?=\D|$)/, "").replace(/^/, value < 0 ? "−" : "");
    if (size < 1e-2) return format.number(value).replace(".0e", "e");
    return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace("-", "−");
  }
}

/** A card of one or more panels over the same steps. Series kinds: line, band, stack, points. */
class Plot {
  constructor(spec) {
    this.spec = spec;
    this.panels = spec.panels.map((panel, i) => ({ panel, legend: el("div", { class: "legend" }), host: el("div"), clip: `clip-${VIEW.plots.length}-${i}` }));
    this.node = el("article", { class: "card plot" }, el("h3", {}, spec.title), spec.note && el("p", { class: "lead" }, spec.note));
    this.empty = !spec.panels.some((panel) => panel.series.some((s) => values(s).some(isNumber)));
    if (this.empty) return;
    this.node.append(...this.panels.flatMap(({ legend, host }) => [legend, host]));
    VIEW.plots.push(this);
    const host = this.panels[0].host;
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (host.clientWidth !== this.width) this.draw();
    })).observe(host);
  }

  draw() {
    const width = this.width = this.panels[0].host.clientWidth;
    if (!width) return;
    this.x0 = 48; this.x1 = width - 12;
    [this.low, this.high] = xDomain();
    this.panels.forEach((place, i) => this.drawPanel(place, width, i === 0, i === this.panels.length - 1));
    this.readOut();
  }
  x(step) { return this.x0 + ((step - this.low) / (this.high - this.low)) * (this.x1 - this.x0); }
  stepAt(clientX) {
    const box = this.panels[0].host.getBoundingClientRect();
    const step = this.low + ((clientX - box.left - this.x0) / (this.x1 - this.x0)) * (this.high - this.low);
    return Math.max(this.low, Math.min(this.high, step));
  }
  onKey(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
    if (!by || !VIEW.steps.length) return;
    event.preventDefault();
    const i = VIEW.at === null ? (by > 0 ? -1 : VIEW.steps.length) : nearest(VIEW.steps, VIEW.at);
    setAt(VIEW.steps[Math.max(0, Math.min(VIEW.steps.length - 1, i + by))]);
  }
  describe(panel) {
    const main = panel.series.find((s) => s.kind !== "band") || panel.series[0], all = values(main).filter(isNumber);
    const show = panel.format || (panel.percent ? format.percent : format.number);
    return `${this.spec.title}, ${panel.unit}: ${all.length ? `${main.name} from ${show(all[0])} to ${show(all[all.length - 1])}` : "no values"}`;
  }

  drawPanel(place, width, first, lowest) {
    const { panel, clip, host } = place, top = 16, bottom = panel.height || 170, height = bottom + (lowest ? 36 : 6);
    const root = svg("svg", { role: "img", "aria-label": this.describe(panel), tabindex: "0", viewBox: `0 0 ${width} ${height}`, height, onkeydown: (e) => this.onKey(e) });
    for (const name of ["pointermove", "pointerdown"]) root.addEventListener(name, (event) => setAt(this.stepAt(event.clientX)));
    root.addEventListener("pointerleave", () => setAt(null));
    const scale = new Scale(panel, panel.series.flatMap((s) => (s.kind === "stack" ? s.total : values(s))), top, bottom);
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: this.x0 - 4, y: top - 3, width: this.x1 - this.x0 + 8, height: bottom - top + 6 })));
    for (const [value, label] of scale.ticks()) {
      const y = scale.y(value);
      root.append(svg("line", { class: "gridline", x1: this.x0, x2: this.x1, y1: y, y2: y }));
      root.append(svg("text", { x: this.x0 - 7, y: y + 4, "text-anchor": "end" }, label));
    }
    const unit = panel.unit + (scale.log ? ", log scale" : "");
    let free = 6 * unit.length + 30; // about where the next label may begin
    root.append(svg("text", { class: "unit", x: 0, y: top - 7 }, unit));
    for (const step of DATA.resumed) {
      root.append(svg("line", { class: "mark", x1: this.x(step), x2: this.x(step), y1: top, y2: bottom }, svg("title", {}, `resumed from step ${step}`)));
      if (!first || this.x(step) < free) continue;
      root.append(svg("text", { x: this.x(step), y: top - 7, "text-anchor": "middle" }, "resumed"));
      free = this.x(step) + 60;
    }
    for (const alarm of panel.series.length ? this.alarms() : []) {
      const at = this.x(alarm.step), label = `alarm ${alarm.alarm} at step ${alarm.step}`;
      root.append(svg("line", { class: "mark alarm", x1: at, x2: at, y1: top, y2: bottom }, svg("title", {}, label)));
      if (first && at >= free) { root.append(svg("text", { class: "alarm", x: at, y: top - 7, "text-anchor": "middle" }, "alarm")); free = at + 44; }
    }
    root.append(svg("line", { class: "axis", x1: this.x0, x2: this.x1, y1: bottom, y2: bottom }));
    const layer = svg("g", { "clip-path": `url(#${clip})` });
    root.append(layer);
    for (const s of panel.series) this["draw_" + s.kind](layer, s, scale);
    this.markSpikes(root, panel, scale);
    if (lowest) this.drawSteps(root, bottom);
    place.cross = svg("line", { class: "cross", y1: top - 4, y2: bottom, visibility: "hidden" });
    place.dots = svg("g");
    place.scale = scale;
    root.append(place.cross, place.dots);
    host.replaceChildren(root);
  }
  /** Alarms that looked at one of the metrics drawn here. */
  alarms() {
    const here = this.spec.panels.flatMap((panel) => panel.series.flatMap((s) => [s.metric, ...(s.parts || []).map((part) => part.metric)]));
    return DATA.alarms.filter((alarm) => (alarm.metrics || []).some((name) => here.includes(name)));
  }
  drawSteps(root, y) {
    const step = Math.max(1, niceStep(this.high - this.low, Math.max(2, (this.x1 - this.x0) / 90)));
    for (let v = Math.ceil(this.low / step) * step; v <= this.high; v += step) {
      root.append(svg("text", { x: this.x(v), y: y + 16, "text-anchor": "middle" }, v.toLocaleString("en-US")));
    }
    root.append(svg("text", { class: "unit", x: this.x1, y: y + 31, "text-anchor": "end" }, "optimizer step"));
  }
  path(steps, ys, scale) {
    let d = "", pen = false;
    ys.forEach((v, i) => {
      const ok = isNumber(v) && !(scale.log && v <= 0);
      if (ok) d += `${pen ? "L" : "M"}${this.x(steps[i]).toFixed(1)} ${scale.y(v).toFixed(1)}`;
      if (ok && !pen && !(i + 1 < ys.length && isNumber(ys[i + 1]))) d += "h0.01"; // a lone point is a dot
      pen = ok;
    });
    return d;
  }
  draw_line(layer, s, scale) {
    const stroke = { stroke: color(s.color), ...(s.dash ? { "stroke-dasharray": s.dash } : {}) };
    if (VIEW.smooth > 1) layer.append(svg("path", { class: "thin", d: this.path(VIEW.steps, s.y, scale), style: stroke }));
    const extra = s.faint ? { "stroke-width": "1.25", opacity: ".75" } : {};
    layer.append(svg("path", { class: "strong", d: this.path(VIEW.steps, smoothed(s.y, VIEW.smooth), scale), style: { ...stroke, ...extra } }));
  }
  draw_band(layer, s, scale) {
    const lo = smoothed(s.lo, VIEW.smooth), hi = smoothed(s.hi, VIEW.smooth);
    for (const [a, b] of runs(lo, hi)) {
      const there = [], back = [];
      for (let i = a; i < b; i++) {
        const x = this.x(VIEW.steps[i]).toFixed(1);
        there.push(`${x} ${scale.y(hi[i]).toFixed(1)}`); back.unshift(`${x} ${scale.y(lo[i]).toFixed(1)}`);
      }
      layer.append(svg("path", { d: `M${there.concat(back).join("L")}Z`, style: { fill: color(s.color), opacity: s.faint ? ".10" : ".22" } }));
    }
  }
  draw_stack(layer, s, scale) {
    let floor = VIEW.steps.map(() => 0);
    if (s.bars) return this.drawBars(layer, s, scale, floor);
    for (const part of s.parts) {
      const ys = smoothed(part.y, VIEW.smooth), ceiling = floor.map((v, i) => v + (ys[i] || 0)), there = [], back = [];
      VIEW.steps.forEach((step, i) => {
        const x = this.x(step).toFixed(1);
        there.push(`${x} ${scale.y(ceiling[i]).toFixed(1)}`); back.unshift(`${x} ${scale.y(floor[i]).toFixed(1)}`);
      });
      layer.append(svg("path", { d: `M${there.concat(back).join("L")}Z`, style: { fill: color(part.color), opacity: ".82" } }));
      floor = ceiling;
    }
  }
  drawBars(layer, s, scale, floor) { // counts: nothing lies between two steps
    const width = Math.max(1, Math.min(14, 0.7 * (this.x1 - this.x0) / Math.max(1, VIEW.steps.length)));
    for (const part of s.parts) {
      let d = "";
      VIEW.steps.forEach((step, i) => {
        if (!part.y[i]) return;
        const y = scale.y(floor[i] + part.y[i]);
        d += `M${(this.x(step) - width / 2).toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}V${scale.y(floor[i]).toFixed(1)}h${(-width).toFixed(1)}z`;
        floor[i] += part.y[i];
      });
      layer.append(svg("path", { d: d || "M0 0", style: { fill: color(part.color), opacity: ".85" } }));
    }
  }
  draw_points(layer, s, scale) {
    const at = s.x.map((step) => this.x(step) + (s.shift || 0)), style = { stroke: color(s.color) };
    layer.append(svg("path", { class: "strong", d: "M" + at.map((x, i) => `${x} ${scale.y(s.y[i])}`).join("L"), style: { ...style, "stroke-width": "1.5", opacity: ".55" } }));
    at.forEach((x, i) => {
      if (s.ci[i]) layer.append(svg("path", { class: "strong", d: `M${x} ${scale.y(s.ci[i][0])}V${scale.y(s.ci[i][1])}m-4 0h8M${x - 4} ${scale.y(s.ci[i][0])}h8`, style }));
      layer.append(svg("circle", { cx: x, cy: scale.y(s.y[i]), r: 4, style: { fill: color(s.color), stroke: "var(--card)", "stroke-width": "1.5" } }));
    });
  }
  markSpikes(root, panel, scale) {
    if (!panel.robust) return;
    for (const s of panel.series) {
      if (s.kind === "band") continue;
      (s.kind === "stack" ? s.total : s.y).forEach((v, i) => {
        const over = isNumber(v) && scale.y(v) < scale.top - 1, under = isNumber(v) && scale.y(v) > scale.bottom + 1;
        if (!over && !under) return;
        const x = this.x(VIEW.steps[i]), y = over ? scale.top - 2 : scale.bottom + 2, h = over ? 5 : -5;
        root.append(svg("path", { d: `M${x - 3} ${y + h}h6l-3 ${-h}z`, style: { fill: color(s.color || "grey") } }, svg("title", {}, `step ${VIEW.steps[i]}: ${format.number(v)}, off the scale`)));
      });
    }
  }

  readOut() {
    const i = VIEW.at === null ? null : nearest(VIEW.steps, VIEW.at);
    const step = VIEW.at === null ? null : i >= 0 ? VIEW.steps[i] : VIEW.at;
    for (const { panel, legend, scale, cross, dots } of this.panels) {
      if (!cross) continue;
      cross.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) { cross.setAttribute("x1", this.x(step)); cross.setAttribute("x2", this.x(step)); }
      dots.replaceChildren();
      const show = panel.format || (panel.percent ? format.percent : format.number);
      const keys = [];
      let evaluated = null;
      for (const s of panel.series) {
        if (s.kind === "stack") for (const part of s.parts) keys.push(key(part.name, part.color, "area", show(i === null ? last(part.y) : part.y[i])));
        else if (s.kind === "band") keys.push(key(s.name, s.color, "area", i === null ? `${show(last(s.lo))} … ${show(last(s.hi))}` : `${show(s.lo[i])} … ${show(s.hi[i])}`, Boolean(s.faint)));
        else if (s.kind === "points") {
          const e = VIEW.at === null ? s.x.length - 1 : nearest(s.x, VIEW.at);
          evaluated = s.x[e];
          keys.push(key(s.name, s.color, "dot", `${format.percent1(s.y[e])}${s.ci[e] ? ` (${format.interval(s.ci[e])})` : ""}`));
        } else {
          keys.push(key(s.name, s.color, "line", show(i === null ? last(s.y) : s.y[i])));
          if (i !== null && i >= 0 && isNumber(s.y[i])) {
            const y = Math.max(scale.top, Math.min(scale.bottom, scale.y(s.y[i])));
            dots.append(svg("circle", { cx: this.x(step), cy: y, r: 3.5, style: { fill: color(s.color), stroke: "var(--card)", "stroke-width": "1.5" } }));
          }
        }
      }
      if (evaluated !== null) keys.push(el("span", {}, `at step ${evaluated}`));
      legend.replaceChildren(...keys);
    }
  }
}

const values = (s) => (s.kind === "band" ? [...s.lo, ...s.hi] : s.kind === "stack" ? s.total : s.kind === "points" ? [...s.y, ...s.ci.flatMap((c) => c || [])] : s.y);

function key(name, tint, shape, value, faint) {
  return el("span", { class: "key" }, el("i", { class: shape, style: { background: color(tint), opacity: faint === undefined ? "1" : faint ? ".2" : ".45" } }), name, value ? el("b", {}, value) : null);
}

/** Stretches of indices where both columns have values. */
function runs(lo, hi) {
  const out = [];
  let from = -1;
  for (let i = 0; i <= lo.length; i++) {
    const ok = i < lo.length && isNumber(lo[i]) && isNumber(hi[i]);
    if (ok && from < 0) from = i;
    if (!ok && from >= 0) { out.push([from, i]); from = -1; }
  }
  return out;
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
    document.getElementById("at").textContent = i >= 0 ? `step ${VIEW.steps[i]}` : "";
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
