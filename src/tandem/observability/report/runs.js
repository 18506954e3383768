// All runs of a folder, and runs compared.

const TINTS = ["blue", "orange", "teal", "violet", "pink", "gold"];
const address = (name, values) => `?${values.map((value) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
const chosen = new Set(); // runs to compare

/** The list of runs: what each does, in a sentence, and how its reward went. */
function runsPage({ folder, runs }) {
  document.title = "Runs · Tandem";
  const counts = {};
  for (const run of runs) counts[run.summary.status] = (counts[run.summary.status] || 0) + 1;
  const button = el("button", { type: "button", onclick: () => { location.search = address("compare", runs.map((run) => run.name).filter((name) => chosen.has(name))); } });
  const say = () => { button.disabled = chosen.size < 2; button.textContent = chosen.size < 2 ? "Choose runs to compare" : `Compare ${chosen.size} runs`; };
  const choice = (name) => el("input", { type: "checkbox", "aria-label": `compare ${name}`, checked: chosen.has(name), onchange: (e) => { chosen[e.target.checked ? "add" : "delete"](name); say(); } });
  say();
  return [
    el("header", {}, brand(), el("div", { class: "row spread" }, el("h1", {}, "Runs"), button),
      el("p", { class: "lead" }, `${Object.entries(counts).map(([status, n]) => `${n} ${status}`).join(", ") || "There is no run yet"} in ${folder}`)),
    el("div", { class: "runs" }, runs.map((run) => runCard(run, choice(run.name)))),
  ];
}

function runCard({ name, summary, diagnosis, alarms, curve }, choice) {
  const { status, steps, steps_planned: planned, reward_first: first, reward_last: last, before, after } = summary;
  const facts = Object.fromEntries(summary.facts), ys = curve.values.reward || [];
  const number = (label, text) => el("div", {}, el("dt", {}, label), el("dd", {}, text));
  const held = after ? `${format.percent(before.mean).replace(" %", "")} → ${format.percent(after.mean)}` : before ? format.percent(before.mean) : "–";
  return el("article", { class: "card run" }, choice,
    el("div", {}, el("div", { class: "row" }, el("h2", {}, el("a", { href: address("run", [name]) }, name)), el("span", { class: `status ${status.split(" ")[0]}` }, status), alarms ? el("span", { class: "chip down" }, `${alarms} ${alarms === 1 ? "alarm" : "alarms"}`) : null),
      el("p", { class: "lead" }, diagnosis), el("p", { class: "keys" }, [facts.model, facts.environment, summary.started && new Date(1000 * summary.started).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })].filter(Boolean).join(" · "))),
    el("dl", { class: "facts" }, number("step", `${steps.toLocaleString("en-US")}${planned ? ` of ${planned.toLocaleString("en-US")}` : ""}`), number("held out", held), number("reward", first === null ? "–" : `${format.fixed(first, 2)} → ${format.fixed(last, 2)}`)),
    ys.filter(isNumber).length > 1 ? sparkline(smoothed(ys, Math.round(ys.length / 25)), "blue", 160, 40) : el("span"));
}

/** Runs on the same axes, what their recipes differ in, and what was gained task by task. */
function comparePage({ runs, differences, gains }) {
  document.title = `${runs.map((run) => run.name).join(", ")} · Tandem`;
  const tint = (i) => TINTS[i % TINTS.length], dash = (i) => (i < TINTS.length ? undefined : [4, 3]);
  VIEW.steps = [...new Set(runs.flatMap((run) => run.series.steps))].sort((a, b) => a - b);
  VIEW.marks = runs.flatMap((run) => run.evaluations.map((e) => e.step));
  const spread = runs.some((run) => run.series.steps.join() !== VIEW.steps.join()); // then a line spans the others' steps
  const lines = (name) => runs.flatMap((run, i) => {
    const ys = run.series.values[name];
    if (!ys) return [];
    const at = new Map(run.series.steps.map((step, k) => [step, ys[k]])), smooth = smoothed(ys, Math.round(ys.length / 25));
    const soft = new Map(run.series.steps.map((step, k) => [step, smooth[k]]));
    return [{ kind: "line", name: run.name, metric: name, y: VIEW.steps.map((step) => (at.has(step) ? soft.get(step) : null)), color: tint(i), dash: dash(i), span: spread }];
  });
  const held = runs.map((run, i) => { const rows = run.evaluations.filter((e) => e.env === run.evaluations[0].env); return { kind: "points", name: run.name, x: rows.map((e) => e.step), y: rows.map((e) => e.mean), ci: rows.map((e) => e.ci), color: tint(i), shift: 3 * i }; }).filter((s) => s.x.length);
  const percent = { percent: true, zero: true };
  const panels = { reward: ["Reward", "reward per rollout"], accuracy: ["Training accuracy", "share of answers, %", percent], length: ["Answer length", "tokens per answer", { zero: true }], entropy: ["Entropy", "nats per token", { zero: true }], kl_behavior: ["Drift between sampler and trainer", "nats per token", { log: true }], grad_norm: ["Gradient", "norm of the gradient", { zero: true, robust: true }], "seconds/step": ["Time per step", "seconds", { zero: true, robust: true, format: format.seconds }], tokens_per_second: ["Speed", "sampled tokens per second", { zero: true, robust: true }] };
  const asked = new URLSearchParams(location.search).getAll("metric").filter((name) => !(name in panels)).map((name) => [name, [name, name.split("/").pop(), { robust: true }]]);
  const plots = [
    held.length && plot("Held-out evaluation", "answers with full marks; bars are 95 % confidence intervals", [{ unit: "share of answers, %", percent: true, zero: true, height: 216, series: held }]),
    ...[...asked, ...Object.entries(panels)].map(([name, [title, unit, more]]) => plot(title, null, [{ unit, height: 216, series: lines(name), ...more }])),
  ].filter((p) => p && !p.empty);
  const other = el("select", { "aria-label": "another metric", onchange: (e) => { location.search += address("metric", [e.target.value]).replace("?", "&"); } }, el("option", { value: "" }, "another metric"), [...new Set(runs.flatMap((run) => run.metrics))].filter((name) => !(name in panels)).map((name) => el("option", {}, name)));
  const options = Object.entries(differences);
  return [
    el("header", {}, brand(el("a", { href: "?" }, "all runs")), el("h1", {}, "Runs compared"), el("div", { class: "legend" }, runs.map((run, i) => el("span", { class: "key" }, el("i", { class: "area", style: { background: color(tint(i)) } }), el("a", { href: address("run", [run.name]) }, run.name))))),
    el("section", { id: "results" }, el("h2", {}, "Held out"), el("p", { class: "lead" }, "Differences are to the first run, task by task, with 95 % intervals."),
      table(["", "before", "after", "first difference", "last difference"], runs.map((run, i) => {
        const { before, after } = run.summary, result = (e) => (e ? `${format.percent1(e.mean)}${e.ci ? ` (${format.interval(e.ci)})` : ""}, step ${e.step}` : "–");
        return [run.name, result(before), result(after), ...[0, 1].map((place) => (i ? gainText(gains[place] && gains[place][i]) : "–"))];
      }))),
    el("section", { id: "differences" }, el("h2", {}, "Recipes"), options.length ? table(["option", ...runs.map((run) => run.name)], options.map(([name, values]) => [name, ...values.map((value) => value || "–")])) : el("p", { class: "lead" }, "They do not differ.")),
    el("section", { id: "curves" }, el("div", { class: "row spread" }, el("h2", {}, "Curves"), el("div", { class: "row" }, other, el("span", { id: "at" }))), el("div", { class: "plots" }, plots.map((p) => p.node))),
  ];
}

function gainText(gain) {
  if (!gain) return "no paired interval";
  const points = (x) => (100 * x).toFixed(1).replace("-", "−"), [low, high] = gain.ci, kind = low > 0 ? "" : high < 0 ? "down" : "flat";
  return [el("span", { class: `chip ${kind}` }, `${gain.mean > 0 ? "+" : ""}${points(gain.mean)} points`), ` [${points(low)}, ${points(high)}]; ${gain.better} tasks better, ${gain.worse} worse`];
}
