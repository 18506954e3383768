// The page from top to bottom: head, cards, plots, held-out answers, tables.

let S;
/** Newer values of some parts of the run. */
function take(parts) {
  Object.assign(DATA, parts);
  S = DATA.summary;
  VIEW.steps = DATA.series.steps;
  VIEW.marks = DATA.evaluations.map((e) => e.step);
}
const TIME_COLORS = { wait: "sky", forward_backward: "blue", pack: "teal", optimizer: "violet", sync: "pink", checkpoint: "gold", evaluate: "orange" };
const timeName = (part) => ({ wait: DATA.sampling, forward_backward: "forward and backward", pack: "packing", sync: "publish", evaluate: "evaluation", record: "writing" })[part] || part.replaceAll("_", " ");
const NO_PARTS = ["seconds/step", "seconds/grading"]; // the whole, and a sum over groups that are graded at the same time
const drawn = new Set(["tokens/generated", "tokens/trained", "alarms"]);

function head() {
  const of = S.steps_planned ? ` of ${S.steps_planned.toLocaleString("en-US")}` : "";
  const now = DATA.live ? "" : " when this page was made";
  const status = { finished: "finished", interrupted: `interrupted at step ${S.steps}${of}`, failed: `failed at step ${S.steps}${of}`, running: `running, at step ${S.steps}${of}${now}`, killed: `killed after step ${S.steps}${of}`, unfinished: `at step ${S.steps}${of}${now}`, "not started": "no step yet" }[S.status];
  const when = S.started ? new Date(1000 * S.started).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : null;
  const facts = [...S.facts, when && ["started", when], S.seconds > 0 && ["ran for", format.seconds(S.seconds)], S.resumes > 0 && ["resumed", S.resumes === 1 ? "once" : `${S.resumes} times`]].filter(Boolean);
  return el("header", {},
    brand(DATA.live && el("a", { href: "?" }, "all runs")),
    el("div", { class: "row" }, el("h1", {}, DATA.name), el("span", { class: `status ${S.status.split(" ")[0]}` }, status)),
    el("dl", { class: "facts" }, facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))),
    el("p", { class: "notice told", id: "diagnosis" }, DATA.diagnosis), notices());
}
const brand = (...links) => el("div", { class: "brand" }, logo(), "Tandem", links);

/** Who waits for whom, as the run's process last told. */
function now() {
  const { state, headline, chain, waits, ranks, words } = DATA.now || {};
  if (!DATA.now || state === "ended") return null;
  const links = chain.flatMap((name, i) => [i ? el("span", { class: "soft" }, "waits for") : null, el("span", { class: `chip ${i === chain.length - 1 ? "down" : "flat"}` }, name)]);
  return el("section", { id: "now" }, el("h2", {}, "Now"), el("p", { class: "lead" }, headline),
    chain.length ? el("div", { class: "row chain" }, links) : null,
    waits.length ? table(["who waits", "for whom", "what for", "since", "deadline in"], waits.slice(0, 12)) : null,
    ranks.length ? table(["rank", "host", "state", "what it does"], ranks) : null,
    words.length ? el("details", { class: "fold" }, el("summary", {}, "The last word of each part, engines among them"), table(["part", "ago", "its last word"], words.map(([part, ago, text]) => [part, format.seconds(ago), text]))) : null);
}
const table = (heads, rows) => el("div", { class: "card table words", tabindex: "0" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { "data-head": heads[i] || null }, cell)))))));

/** Alarms, open ones first, with what they mean and what to change. */
function alarms() {
  const rows = [...DATA.alarms.filter((a) => a.over === null), ...DATA.alarms.filter((a) => a.over !== null)];
  if (!rows.length) return null;
  const when = (a) => `step ${a.step}${a.over === null ? ", not over" : ` to ${a.over}`}`;
  return el("section", { id: "alarms", class: "alarms", "aria-label": "alarms" }, rows.map((a) => el("details", { class: `alarm${a.over === null ? "" : " over"}`, open: a.over === null },
    el("summary", {}, el("b", {}, `Alarm: ${a.alarm.replaceAll("_", " ")}`), " ", el("span", { class: "soft" }, when(a)), el("span", { class: "seen" }, a.seen)),
    el("p", {}, el("b", {}, "Usually: "), a.means), el("p", {}, el("b", {}, "Change: "), a.change))));
}

function logo() { // two wheels, one frame
  const ring = (x, tint) => svg("circle", { cx: x, cy: 11, r: 6.2, style: { fill: "none", stroke: color(tint), "stroke-width": "2.6" } });
  return svg("svg", { viewBox: "0 0 36 19", "aria-hidden": "true" }, svg("path", { d: "M8 11L14 2.5H24L28 11", style: { fill: "none", stroke: "currentColor", "stroke-width": "1.8", opacity: ".55" } }), ring(8, "blue"), ring(28, "orange"));
}

function notices() {
  const odd = Object.entries(DATA.series.odd).map(([name, steps]) => `${name} was not a finite number at ${steps.length === 1 ? `step ${steps[0]}` : `${steps.length} steps, first at step ${steps[0]}`}`);
  return [S.error ? el("p", { class: "notice", id: "failure" }, el("b", {}, "Failed: "), S.error) : null, odd.length ? el("p", { class: "notice" }, odd.join("; "), ".") : null];
}

function headCard(title, wide, big, ...rest) { return el("article", { class: `card head-card${wide ? " wide" : ""}` }, el("h3", {}, title), big, rest); }
const change = (a, b) => [el("span", { class: "was" }, a), el("span", { class: "to" }, " → "), b];

function cards() {
  return el("div", { class: "cards" }, evaluationCard(), rewardCard(), speedCard(), timeCard());
}

function evaluationCard() {
  const title = "Held-out accuracy", { before, after } = S;
  if (!before) return headCard(title, true, el("div", { class: "big" }, "–"), el("p", { class: "foot" }, "this run was not evaluated on held-out tasks"));
  const now = after || before, points = after ? 100 * (after.mean - before.mean) : null;
  const big = el("div", { class: "big" }, after ? change(format.percent1(before.mean), format.percent1(after.mean)) : format.percent1(before.mean));
  const sign = points > 0 ? "+" : points < 0 ? "−" : "±";
  const known = after && before.ci && after.ci, worse = known && after.ci[1] < before.ci[0];
  const chip = points === null ? el("span", { class: "chip flat" }, `at step ${before.step}; no later one yet`)
    : el("span", { class: `chip ${S.beyond_interval ? "" : worse ? "down" : "flat"}` }, `${sign}${Math.abs(points).toFixed(1)} points${S.beyond_interval || worse ? ", beyond the intervals" : known ? ", intervals overlap" : ""}`);
  const pass = now.pass_k > 1 && isNumber(now.pass) ? el("span", { class: "soft" }, `pass@${now.pass_k} `, el("b", {}, after && before.pass_k === now.pass_k ? `${format.percent1(before.pass)} → ${format.percent1(now.pass)}` : format.percent1(now.pass))) : null;
  const of = now.tasks ? `mean of ${now.tasks} tasks × ${now.samples || 1} samples` : "mean over held-out tasks";
  return headCard(title, true, big, el("div", { class: "row", style: { margin: "4px 0 2px" } }, chip, pass), intervals([before, after].filter(Boolean)), el("p", { class: "foot" }, `${of}; bars are 95 % confidence intervals`));
}

/** Before and after on one axis from 0 to 100 %, with whiskers. */
function intervals(points) {
  const width = 430, x = (share) => 18 + share * (width - 40), root = svg("svg", { viewBox: `0 0 ${width} ${20 * points.length + 24}`, role: "img", "aria-label": points.map((p) => `step ${p.step}: ${format.percent1(p.mean)}, interval ${format.interval(p.ci)} %`).join("; "), style: { "margin-top": "6px", "max-height": "84px" } });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(svg("line", { class: "gridline", x1: x(share), x2: x(share), y1: 2, y2: 20 * points.length + 4 }));
    root.append(svg("text", { x: x(share), y: 20 * points.length + 18, "text-anchor": "middle", style: { font: "11px var(--sans)", fill: "var(--faint)" } }, `${100 * share} %`));
  }
  points.forEach((point, i) => {
    const y = 13 + 20 * i, tint = i === points.length - 1 && points.length > 1 ? "blue" : "grey";
    if (point.ci) root.append(svg("path", { d: `M${x(point.ci[0])} ${y}H${x(point.ci[1])}m0 -5v10M${x(point.ci[0])} ${y - 5}v10`, style: { stroke: color(tint), "stroke-width": "2", fill: "none" } }));
    root.append(svg("circle", { cx: x(point.mean), cy: y, r: 5, style: { fill: color(tint), stroke: "var(--card)", "stroke-width": "2" } }));
    const right = x(point.ci ? point.ci[1] : point.mean) + 9, text = `step ${point.step}`;
    const fits = right + 48 < width;
    root.append(svg("text", { x: fits ? right : x(point.ci ? point.ci[0] : point.mean) - 9, y: y + 4, "text-anchor": fits ? "start" : "end", style: { font: "11px var(--sans)", fill: "var(--soft)" } }, text));
  });
  return root;
}

function rewardCard() {
  const ys = column("reward") || [], n = S.reward_window;
  if (S.reward_first === null) return headCard("Training reward", false, el("div", { class: "big" }, "–"), el("p", { class: "foot" }, "no step has finished"));
  const spark = sparkline(smoothed(ys, Math.max(1, Math.round(ys.length / 25))), "blue", 240, 44);
  spark.style.height = "44px"; spark.style.margin = "10px 0 4px";
  return headCard("Training reward", false, el("div", { class: "big" }, change(format.fixed(S.reward_first, 3), format.fixed(S.reward_last, 3))), spark, el("p", { class: "foot" }, `mean of the first and of the last ${n === 1 ? "step" : `${n} steps`}`));
}

function speedCard() {
  const ys = column("tokens_per_second") || [], spark = ys.some(isNumber) ? sparkline(ys, "teal", 240, 44) : null;
  if (spark) { spark.style.height = "44px"; spark.style.margin = "10px 0 4px"; }
  return headCard("Speed", false, el("div", { class: "big" }, format.number(S.tokens_per_second), el("small", {}, " tokens/s")), spark,
    el("p", { class: "foot" }, `median over steps${S.tokens_generated ? `; ${format.count(S.tokens_generated)} tokens sampled` : ""}`));
}

function timeParts() {
  return Object.keys(DATA.series.values).filter((name) => name.startsWith("seconds/") && !NO_PARTS.includes(name)).map((name) => {
    const part = name.slice(8), y = column(name), total = y.reduce((sum, v) => sum + (v || 0), 0) * DATA.series.share;
    return { name: timeName(part), metric: name, color: TIME_COLORS[part] || "grey", y, total };
  }).filter((part) => part.total > 0).sort((a, b) => b.total - a.total);
}

function whereBar(parts) {
  const total = parts.reduce((sum, part) => sum + part.total, 0);
  return el("div", { class: "where", role: "img", "aria-label": parts.map((part) => `${part.name} ${format.percent(part.total / total)}`).join(", ") },
    parts.map((part) => el("div", { style: { background: color(part.color), flex: `${part.total / total} 0 0` }, title: `${part.name}: ${format.seconds(part.total)}, ${format.percent(part.total / total)}` })));
}

function timeCard() {
  const parts = timeParts(), total = parts.reduce((sum, part) => sum + part.total, 0);
  const top = parts.slice(0, 3).map((part) => [el("dt", {}, el("i", { style: { background: color(part.color) } }), part.name), el("dd", {}, format.percent(part.total / total))]);
  return headCard("Time per step", false, el("div", { class: "big" }, ...splitUnit(format.seconds(S.seconds_per_step))), parts.length ? [whereBar(parts), el("dl", { class: "shares" }, top)] : null,
    el("p", { class: "foot" }, `mean; ${S.steps.toLocaleString("en-US")} step${S.steps === 1 ? "" : "s"} in ${format.seconds(S.seconds)}`));
}
const splitUnit = (text) => { const found = /^([\d.]+)( \D+)$/.exec(text); return found ? [found[1], el("small", {}, found[2])] : [text]; };

function toolbar() {
  const windows = [1, 3, 5, 7, 9, 13, 19, 27, 39, 55, 79, 111].filter((n) => n <= Math.max(1, VIEW.steps.length / 3));
  const wanted = Math.min(27, VIEW.steps.length / 12);
  let start = 0;
  windows.forEach((n, i) => { if (n <= wanted) start = i; });
  VIEW.smooth = windows[start];
  const text = el("output", {});
  const say = () => { const n = VIEW.smooth * DATA.series.share; text.textContent = n === 1 ? "none" : `mean of ${n} steps`; };
  const slider = el("input", { type: "range", min: 0, max: windows.length - 1, value: start, disabled: windows.length < 2, "aria-label": "smoothing", oninput: (e) => { VIEW.smooth = windows[e.target.value]; say(); VIEW.plots.forEach((plot) => plot.draw()); } });
  say();
  const links = [DATA.now && DATA.now.state !== "ended" && ["#now", "Now"], ["#curves", "Curves"], DATA.rollouts.steps.length && ["#rollouts", "Rollouts"], DATA.answers.length && ["#answers", "Held-out answers"], ["#numbers", "Numbers"], ["#recipe", "Recipe"]].filter(Boolean);
  return el("div", { class: "bar row spread" }, el("nav", {}, links.map(([href, name]) => el("a", { href }, name))),
    el("div", { class: "row" }, el("label", {}, "Smoothing", slider, text), el("span", { id: "at", "aria-live": "off" })));
}

// ---- plots

function use(...names) { names.forEach((name) => drawn.add(name)); }
function spread(name, tint, main = "mean") {
  use(name, ...["std", "min", "p25", "p50", "p75", "max"].map((q) => `${name}/${q}`));
  const get = (q) => column(`${name}/${q}`), series = [];
  if (get("min") && get("max")) series.push({ kind: "band", name: "min to max", lo: get("min"), hi: get("max"), color: tint, faint: true });
  if (get("p25") && get("p75")) series.push({ kind: "band", name: "middle half", lo: get("p25"), hi: get("p75"), color: tint });
  if (column(name)) series.push({ kind: "line", name: main, metric: name, y: column(name), color: tint });
  return series;
}
function line(metric, name, tint, more = {}) { use(metric); return column(metric) ? [{ kind: "line", name, metric, y: column(metric), color: tint, ...more }] : []; }
function plot(title, note, panels) {
  const kept = panels.filter((panel) => panel.series.length), spec = { title, note, panels: kept.length ? kept : [{ unit: "", series: [] }] };
  let found = VIEW.plots.find((p) => p.name === `${title} ${spec.panels.length}`);
  if (found) found.take(spec);
  else VIEW.plots = [...VIEW.plots.filter((p) => p.spec.title !== title), found = new Plot(spec)];
  return found;
}

function evaluationPlot() {
  const environments = [...new Set(DATA.evaluations.map((e) => e.env))], tints = ["blue", "teal", "pink", "gold"];
  const series = environments.flatMap((env, i) => {
    const rows = DATA.evaluations.filter((e) => e.env === env), k = rows.length ? rows[rows.length - 1].pass_k : null, label = environments.length > 1 ? `${env} ` : "";
    const passes = rows.filter((e) => !i && k > 1 && e.pass_k === k && isNumber(e.pass)); // of several, that of all together
    return [
      { kind: "points", name: `${label}mean`, x: rows.map((e) => e.step), y: rows.map((e) => e.mean), ci: rows.map((e) => e.ci), color: tints[i % 4] },
      passes.length && { kind: "points", name: `${label}pass@${k}`, x: passes.map((e) => e.step), y: passes.map((e) => e.pass), ci: passes.map((e) => e.pass_ci), color: "orange", shift: 3 },
    ].filter(Boolean);
  });
  const training = line("accuracy", "training", "grey", { faint: true });
  return plot("Held-out evaluation", "answers with full marks; bars are 95 % confidence intervals", [{ unit: "share of answers, %", percent: true, zero: true, height: 230, series: [...training, ...series] }]);
}

/** How each of several environments does; null where there is but one. */
function environmentPlot() {
  const names = Object.keys(DATA.series.values).map((name) => /^env\/(.+)\/trained$/.exec(name)).filter(Boolean).map((found) => found[1]);
  names.forEach((name) => use(`env/${name}/trained`, `env/${name}/groups`));
  if (names.length < 2) return null;
  const palette = ["blue", "orange", "teal", "violet", "pink", "gold"], tint = (i) => palette[i % 6];
  const each = (metric) => names.flatMap((name, i) => line(`env/${name}/${metric}`, name, tint(i)));
  const trained = names.map((name, i) => ({ name, color: tint(i), y: column(`env/${name}/trained`).map((v) => v || 0) }));
  const total = VIEW.steps.map((_, i) => trained.reduce((sum, { y }) => sum + y[i], 0));
  return plot("Environments", "mean reward of every rollout sampled; groups whose rewards are all equal; what batches were made of", [
    { unit: "reward per rollout", height: 140, series: each("reward") },
    { unit: "zero-variance, % of groups", percent: true, zero: true, height: 74, series: each("zero_variance") },
    { unit: "trained groups per step", zero: true, height: 74, series: [{ kind: "stack", bars: true, name: "trained", parts: trained, total }] }]);
}

function timePlot() {
  const parts = timeParts().filter((part) => !["seconds/evaluate", "seconds/checkpoint"].includes(part.metric));
  timeParts().forEach((part) => use(part.metric));
  use("seconds/step");
  const total = VIEW.steps.map((_, i) => parts.reduce((sum, part) => sum + (part.y[i] || 0), 0));
  const series = parts.length ? [{ kind: "stack", name: "all parts", parts, total }] : [];
  return plot("Time per part", "stacked; parts that overlap count in full; evaluation and checkpoints are left out here", [{ unit: "seconds per step", zero: true, robust: true, height: 230, format: format.seconds, series: [...series, ...line("seconds/step", "whole step", "ink", { faint: true, dash: [4, 3] })] }]);
}

function curves() {
  const dropped = ["zero_variance", "stale", "failed"].map((why) => ({ why, y: column(`groups/dropped_${why}`) })).filter(({ why, y }) => { use(`groups/dropped_${why}`); return y && y.some((v) => v > 0); });
  const tint = { zero_variance: "sky", stale: "orange", failed: "pink" };
  const zeros = (ys) => ys.map((v) => v || 0);
  use("rollouts/failed");
  const kinds = Object.keys(DATA.series.values).filter((name) => /^reward\/(?!(.*\/)?(std|group_std|min|p\d+|max)$)/.test(name));
  const palette = ["blue", "orange", "teal", "violet", "pink", "gold"];
  const plots = [
    plot("Reward", "of the rollouts of each step, groups that were dropped on the way included; weighted sum", [{ unit: "reward per rollout", height: 230, series: spread("reward", "blue") }]),
    evaluationPlot(),
    environmentPlot(),
    plot("Answer length", null, [{ unit: "tokens per answer", zero: true, height: 140, series: spread("length", "teal") }, { unit: "cut at the limit, % of answers", percent: true, zero: true, height: 74, series: line("rollouts/truncated", "truncated", "orange") }]),
    plot("Drift between sampler and trainer", "KL(sampling policy ‖ trained policy), estimated on the sampled tokens", [{ unit: "nats per token", log: true, height: 216, series: line("kl_behavior", "kl_behavior", "violet") }]),
    plot("Probability ratio", null, [{ unit: "trainer ÷ sampler, per token", include: [1], robust: true, height: 140, series: [...line("ratio/max", "largest", "orange", { faint: true }), ...line("ratio", "mean", "blue")] }, { unit: "clipped, % of tokens", percent: true, zero: true, height: 74, series: line("clip_fraction", "clipped", "violet") }]),
    plot("Entropy", "of what each trained token was drawn from; near 0 the answers to a task are all alike, and nothing is learned from them", [{ unit: "nats per token", zero: true, height: 216, series: line("entropy", "entropy", "teal") }]),
    plot("Gradient", null, [{ unit: "norm of the gradient", zero: true, robust: true, height: 140, series: line("grad_norm", "norm", "blue") }, { unit: "learning rate", zero: true, height: 74, series: line("lr", "learning rate", "gold") }]),
    timePlot(),
    plot("Lag and dropped groups", null, [{ unit: "optimizer steps behind, per sample", zero: true, include: [1], height: 140, series: spread("lag", "violet") }, { unit: "dropped groups per step", zero: true, height: 74, series: dropped.length ? [{ kind: "stack", bars: true, name: "dropped", parts: dropped.map(({ why, y }) => ({ name: why, metric: `groups/dropped_${why}`, color: tint[why], y: zeros(y) })), total: VIEW.steps.map((_, i) => dropped.reduce((sum, { y }) => sum + (y[i] || 0), 0)) }] : [] }]),
    kinds.length > 1 && plot("Reward functions", "each before its weight", [{ unit: "mean reward", height: 216, series: kinds.flatMap((name, i) => line(name, name.slice(7), palette[i % 6])) }]),
    plot("Engine", "sampled tokens by the seconds of a step; when it waited for work, and for new weights", [{ unit: "sampled tokens per second", zero: true, robust: true, height: 140, series: line("tokens_per_second", "tokens/s", "teal") }, { unit: "seconds per step", zero: true, robust: true, height: 74, series: [...line("engine/idle_seconds", "idle", "orange"), ...line("engine/paused_seconds", "paused", "violet")] }]),
    plot("Memory", null, [{ unit: "GB", zero: true, height: 216, series: [...line("memory/rss_gb", "resident", "pink"), ...line("memory/gpu_gb", "GPU, tensors", "blue"), ...line("memory/gpu_reserved_gb", "GPU, reserved", "sky")] }]),
  ].filter(Boolean);
  const shown = plots.filter((p) => !p.empty), missing = plots.filter((p) => p.empty).map((p) => p.spec.title.toLowerCase());
  const share = DATA.series.share > 1 ? ` Each point is the mean of ${DATA.series.share} steps.` : "";
  const lead = shown.length ? `Point at any of them to read all of them at that step.${share}` : "No step has finished and nothing was evaluated yet.";
  const names = shown.map((p) => p.name).join();
  if (VIEW.section && VIEW.section.dataset.names === names) { // the same plots of newer values
    shown.forEach((p) => p.draw());
    VIEW.others();
    return VIEW.section;
  }
  return VIEW.section = el("section", { id: "curves", "data-names": names }, el("h2", {}, "Curves"), el("p", { class: "lead" }, lead), el("div", { class: "plots" }, shown.map((p) => p.node)),
    shown.length && missing.length ? el("p", { class: "keys", style: { "margin-top": "10px" } }, `Nothing was recorded of: ${missing.join(", ")}.`) : null, otherPlots());
}

function otherPlots() {
  const quantiles = /\/(std|min|p25|p50|p75|max)$/;
  const names = Object.keys(DATA.series.values).filter((name) => !drawn.has(name) && !(quantiles.test(name) && column(name.replace(quantiles, ""))));
  VIEW.others = () => {};
  if (!names.length) return null;
  const host = el("div", { class: "plots small" });
  const details = el("details", { class: "fold", ontoggle: () => VIEW.others() }, el("summary", {}, `${names.length} more ${names.length === 1 ? "metric" : "metrics"}`), host);
  VIEW.others = () => { // drawn when asked for
    const plots = details.open ? names.map((name) => plot(name, null, [{ unit: name.split("/").pop(), robust: true, height: 130, series: spread(name, "blue", "mean") }])) : [];
    if (host.children.length !== plots.length) host.replaceChildren(...plots.map((p) => p.node));
    plots.forEach((p) => p.draw());
  };
  return details;
}

// ---- held-out answers

const said = (label, { reward, text }) => el("div", {}, el("h4", {}, `${label}: reward ${format.number(reward)}`), el("pre", {}, text || "(empty)"));

function answers() {
  if (!DATA.answers.length) return null;
  const paired = DATA.answers[0].after !== null;
  const verdict = ({ before, after }) => (!after ? "same" : after.reward > before.reward ? "better" : after.reward < before.reward ? "worse" : "same");
  const counts = { all: DATA.answers.length, better: 0, worse: 0, same: 0 };
  DATA.answers.forEach((row) => { counts[verdict(row)] += 1; });
  const host = el("div", { class: "pairs" });
  const buttons = ["all", "better", "worse", "same"].map((name) => el("button", { type: "button", disabled: !counts[name], onclick: () => show(name) }, `${name} ${counts[name]}`));
  function show(filter) {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", ["all", "better", "worse", "same"][i] === filter));
    host.replaceChildren(...DATA.answers.filter((row) => filter === "all" || verdict(row) === filter).map(pair));
  }
  function pair(row) {
    const kind = { better: "", worse: "down", same: "flat" }[verdict(row)];
    const rewards = paired ? `${format.number(row.before.reward)} → ${format.number(row.after.reward)}` : format.number(row.before.reward);
    return el("details", { class: "card pair" },
      el("summary", {}, el("span", {}, el("span", { class: `chip ${kind}` }, rewards)), el("span", { class: "snippet" }, row.prompt), el("span", { class: "gold" }, row.answer)),
      el("div", { class: "two" }, said(paired ? "before" : "its answer", row.before), paired ? said("after", row.after) : null));
  }
  show("all");
  return el("section", { id: "answers" }, el("h2", {}, paired ? "Held-out answers, before and after" : "Held-out answers"), el("p", { class: "lead" }, paired ? "The same unseen tasks, answered by the first and by the last policy." : "Unseen tasks, answered once so far."), paired ? el("div", { class: "group-of", style: { "margin-top": "12px" } }, buttons) : null, host);
}

// ---- numbers, events, recipe

function numbers() {
  const names = Object.keys(DATA.series.values), quantiles = /\/(std|min|p25|p50|p75|max)$/;
  const body = el("tbody"), search = el("input", { class: "search", type: "search", placeholder: "filter metrics", "aria-label": "filter metrics", value: VIEW.filter || null, oninput: () => { VIEW.filter = search.value; rows(); } });
  const spreadBox = el("input", { type: "checkbox", onchange: () => rows() });
  function rows() {
    const wanted = search.value.trim().toLowerCase();
    const shown = names.filter((name) => name.toLowerCase().includes(wanted) && (spreadBox.checked || !(quantiles.test(name) && column(name.replace(quantiles, "")))));
    body.replaceChildren(...shown.map((name) => {
      const ys = column(name), known = ys.filter(isNumber), mean = known.reduce((a, b) => a + b, 0) / known.length;
      return el("tr", {}, el("td", {}, name), el("td", {}, sparkline(ys, "blue")), [known[0], known[known.length - 1], mean, Math.min(...known), Math.max(...known)].map((v, i) => el("td", {}, i === 1 ? el("b", {}, format.number(v)) : format.number(v))));
    }));
  }
  rows();
  const table = el("table", {}, el("thead", {}, el("tr", {}, ["metric", "trend", "first", "last", "mean", "least", "most"].map((text) => el("th", { scope: "col" }, text)))), body);
  return el("section", { id: "numbers" }, el("div", { class: "row spread" }, el("h2", {}, "Numbers"), names.length ? el("div", { class: "row" }, el("label", { class: "row soft" }, spreadBox, "spreads too"), search) : null),
    names.length ? el("div", { class: "card table metrics", tabindex: "0" }, table) : el("p", { class: "lead" }, "No step has finished."), events());
}

function events() {
  if (!DATA.events.length) return null;
  const counts = Object.entries(DATA.event_counts).map(([name, n]) => `${n} × ${name.replaceAll("_", " ")}`).join(", ");
  const clock = (time) => (isNumber(time) ? new Date(1000 * time).toLocaleTimeString() : "");
  const lines = DATA.events.map(({ time, event, ...rest }) => el("div", {}, el("span", { class: "soft" }, clock(time)), el("b", {}, event), el("span", {}, Object.entries(rest).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · "))));
  const total = Object.values(DATA.event_counts).reduce((a, b) => a + b, 0);
  return el("details", { class: "fold" }, el("summary", {}, `Events: ${counts}`), el("div", { class: "card log", tabindex: "0" }, total > lines.length ? el("p", { class: "soft" }, `${lines.length} of ${total}: the latest of each kind`) : null, lines));
}

function recipe() {
  return el("section", { id: "recipe" }, el("h2", {}, "Recipe"), DATA.config
    ? el("details", { class: "fold" }, el("summary", {}, "config.yaml, every value resolved"), el("div", { class: "card" }, el("pre", { style: { margin: "0" } }, DATA.config)))
    : el("p", { class: "lead" }, "This folder holds no config.yaml."));
}
