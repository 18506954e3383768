// The rollout browser. Of a live page each step is asked for when it is shown.

let R;
const FILTERS = {
  all: { name: "All", keep: () => true },
  best: { name: "Best", keep: (r, top) => isNumber(r.reward) && r.reward === top.high },
  worst: { name: "Worst", keep: (r, top) => isNumber(r.reward) && r.reward === top.low },
  truncated: { name: "Truncated", keep: (r) => r.truncated },
  failed: { name: "Failed", keep: (r) => r.status !== "ok" },
};
const MODES = {
  logprob: { name: "Logprob", low: "certain", high: "improbable", hint: "how improbable a token was to the sampler", gradient: "linear-gradient(90deg, transparent, rgba(var(--violet-rgb), .62))" },
  advantage: { name: "Advantage", low: "pushed down", high: "pushed up", hint: "the advantage a token is trained with", gradient: "linear-gradient(90deg, rgba(var(--orange-rgb), .6), transparent, rgba(var(--blue-rgb), .6))" },
  difference: { name: "Trainer − sampler", low: "less likely", high: "more likely", hint: "logprob of the trainer minus that of the sampler", gradient: "linear-gradient(90deg, rgba(var(--orange-rgb), .6), transparent, rgba(var(--blue-rgb), .6))" },
};

class Browser {
  constructor() {
    this.step = R.steps.length - 1; this.filter = "all"; this.mode = "logprob"; this.sibling = 0;
    this.group = this.liveliest();
    this.most = this.limits();
    this.list = el("div", { class: "list", role: "listbox", "aria-label": "groups" });
    this.detail = el("div", { class: "detail", tabindex: "-1", onpointerover: (e) => this.tip(e), onpointerdown: (e) => this.tip(e), onpointerleave: () => this.hideTip(), onscroll: () => this.hideTip() });
    this.tipNode = el("div", { class: "tip", hidden: true, role: "status" });
    this.which = el("span", {}, which());
    this.tools = el("div", { class: "row tools" });
    this.node = el("div", { class: "card browser", tabindex: "0", "aria-label": "rollout browser", onkeydown: (e) => this.onKey(e) }, this.tools, el("div", { class: "panes" }, this.list, this.detail), this.tipNode);
    this.buildTools();
    this.show();
  }

  /** Largest advantage and usual difference of the embedded tokens, for the colour scales. */
  limits() {
    let advantage = 1e-9;
    const differences = [];
    for (const { groups } of R.steps) for (const group of groups || []) for (const r of group.rollouts) {
      for (const a of Array.isArray(r.a) ? r.a : [r.a]) advantage = Math.max(advantage, Math.abs(a || 0));
      for (let i = 0; i < r.d.length; i += 7) if (r.d[i] !== null) differences.push(Math.abs(r.d[i]) / 1e6);
    }
    differences.sort((a, b) => a - b);
    return { advantage, logprob: 4, difference: differences.length ? Math.max(1e-6, quantile(differences, 0.99)) : 1 };
  }

  groups() {
    const { groups = [] } = R.steps[this.step], rewards = groups.flatMap((g) => g.rollouts.map((r) => r.reward)).filter(isNumber);
    const top = { high: Math.max(...rewards), low: Math.min(...rewards) }, { keep } = FILTERS[this.filter];
    return groups.map((group) => ({ group, shown: group.rollouts.filter((r) => keep(r, top)) })).filter(({ shown }) => shown.length);
  }

  pieces() { return R.steps[this.step].pieces || R.pieces; }
  /** The group whose siblings differ most: there is most to see. */
  liveliest() {
    const differ = this.groups().map(({ shown }) => { const rewards = shown.map((r) => r.reward).filter(isNumber); return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0; });
    return Math.max(0, differ.indexOf(Math.max(...differ)));
  }

  buildTools() {
    this.stepText = el("b");
    this.slider = el("input", { type: "range", min: 0, max: R.steps.length - 1, value: this.step, "aria-label": "step", disabled: R.steps.length < 2, oninput: (e) => this.go({ step: Number(e.target.value) }) });
    const choice = (table, name) => Object.keys(table).map((value) => el("button", { type: "button", title: table[value].hint, onclick: () => this.go({ [name]: value }) }, table[value].name));
    this.filters = choice(FILTERS, "filter");
    this.modes = choice(MODES, "mode");
    this.scale = el("span", { class: "scale" });
    this.tools.append(el("label", { class: "row" }, this.stepText, this.slider), el("div", { class: "group-of", role: "group", "aria-label": "which rollouts" }, this.filters),
      el("div", { class: "row" }, el("div", { class: "group-of", role: "group", "aria-label": "colour of tokens" }, this.modes), this.scale));
  }

  go(change) {
    const before = this.step;
    Object.assign(this, change);
    this.step = Math.max(0, Math.min(R.steps.length - 1, Number(this.step)));
    if ("step" in change || "filter" in change) { this.group = this.liveliest(); this.sibling = 0; }
    if ("group" in change) this.sibling = 0;
    if (before !== this.step) this.slider.value = this.step;
    this.show();
  }

  /** Steps that came since; the newest is shown if the one before was, unless somebody reads it. */
  extend() {
    const newest = this.step === this.slider.max - 0, last = R.steps.length - 1;
    this.slider.max = last;
    this.slider.disabled = last < 1;
    this.which.textContent = which();
    if (newest && last !== this.step && !this.node.matches(":hover, :focus-within")) this.go({ step: last });
  }
  async load(at) {
    Object.assign(R.steps[at], await ask("step", { name: DATA.name, step: R.steps[at].step }));
    this.most = this.limits();
    if (this.step === at) this.go({ step: at });
  }

  show() {
    const { step, left_out } = R.steps[this.step], groups = this.groups();
    if (!R.steps[this.step].groups) this.load(this.step);
    this.group = Math.max(0, Math.min(groups.length - 1, this.group));
    this.stepText.textContent = `step ${step}`;
    this.filters.forEach((button, i) => button.setAttribute("aria-pressed", Object.keys(FILTERS)[i] === this.filter));
    this.modes.forEach((button, i) => button.setAttribute("aria-pressed", Object.keys(MODES)[i] === this.mode));
    const mode = MODES[this.mode], limit = this.most[this.mode];
    this.scale.replaceChildren(this.mode === "logprob" ? "0" : `−${format.number(limit)}`, el("i", { style: { background: mode.gradient }, title: mode.hint }), this.mode === "logprob" ? `−${limit} nats` : `+${format.number(limit)}${this.mode === "difference" ? " nats" : ""}`);
    this.list.replaceChildren(...groups.map((entry, i) => this.item(entry, i)), left_out ? el("p", { class: "keys", style: { padding: "6px 10px" } }, `${left_out} more groups of this step were left out to keep the page small`) : "");
    const current = this.list.children[this.group];
    if (current && current.offsetTop !== undefined) this.keepInView(current);
    this.detail.replaceChildren(...(groups.length ? this.groupView(groups[this.group]) : [this.nothing()]));
    this.detail.scrollTop = 0;
    this.hideTip();
  }
  keepInView(node) {
    const top = node.offsetTop - this.list.offsetTop;
    if (top < this.list.scrollTop) this.list.scrollTop = top - 8;
    else if (top + node.offsetHeight > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + node.offsetHeight - this.list.clientHeight + 8;
  }

  nothing() {
    if (!R.steps[this.step].groups) return el("p", { class: "none" }, "reading");
    const here = this.step, other = R.steps.map((_, i) => i).filter((i) => { this.step = i; return this.groups().length; });
    this.step = here;
    other.sort((a, b) => Math.abs(a - here) - Math.abs(b - here));
    const name = FILTERS[this.filter].name.toLowerCase();
    return el("p", { class: "none" }, `No ${name} rollouts at this step. `, other.length ? el("button", { type: "button", onclick: () => this.go({ step: other[0] }) }, `show step ${R.steps[other[0]].step}`) : "There are none at the embedded steps.");
  }

  item({ group, shown }, i) {
    const asked = [...group.prompt].reverse().find((m) => m.role === "user") || group.prompt[0] || { content: group.id };
    const rewards = group.rollouts.map((r) => r.reward).filter(isNumber), mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const cells = shown.slice(0, 12).map((r) => el("i", { style: { background: tone(r) } }));
    return el("button", { type: "button", class: "item", role: "option", "aria-current": i === this.group, "aria-selected": i === this.group, tabindex: "-1", onclick: () => this.go({ group: i }) },
      el("span", { class: "snippet" }, asked.content.trim().slice(-240)), el("div", { class: "cells" }, cells, shown.length > 12 ? `+${shown.length - 12}` : "", el("span", {}, `mean ${format.number(mean)}`)));
  }

  groupView({ group, shown }) {
    this.sibling = Math.max(0, Math.min(shown.length - 1, this.sibling));
    const rollout = shown[this.sibling];
    const chip = (r, i) => el("button", { type: "button", class: `sib ${sign(r)}${r.truncated ? " trunc" : ""}`, "aria-pressed": i === this.sibling, tabindex: "-1", title: `rollout ${r.id}${r.truncated ? ", truncated" : ""}`, onclick: () => this.go({ sibling: i }) }, isNumber(r.reward) ? format.number(r.reward) : r.status === "ok" ? "no reward" : "failed");
    const chips = shown.map(chip);
    const hidden = group.rollouts.length - shown.length;
    return [
      el("div", { class: "row spread" }, el("h3", {}, group.id), group.answer ? el("span", {}, el("span", { class: "soft" }, "gold answer "), el("span", { class: "gold" }, group.answer)) : null),
      ...group.prompt.map((m) => message(m.role, m.content, true)),
      el("div", { class: "chips", role: "group", "aria-label": "siblings by reward" }, chips, hidden ? el("span", { class: "keys" }, `${hidden} hidden by the filter`) : null),
      this.stats(rollout),
      rollout.error ? el("p", { class: "notice" }, rollout.error) : null,
      ...rollout.said.map((part) => (part.tokens ? message(part.role, this.tokens(rollout, part.tokens)) : message(part.role, part.content))),
      rollout.cut ? el("p", { class: "keys" }, `${rollout.cut.toLocaleString("en-US")} more tokens are in the run folder`) : null,
      shown.length > 1 ? el("h4", { class: "beside" }, "beside it") : null,
      ...shown.map((r, i) => (i === this.sibling ? null : el("div", { class: "other", onclick: () => this.go({ sibling: i }) }, el("div", {}, chip(r, i)), this.glance(r, i)))),
    ].filter(Boolean);
  }

  stats(r) {
    const parts = Object.entries(r.rewards).map(([name, value]) => [name, format.number(value)]);
    const versions = r.versions ? (r.versions[0] === r.versions[1] ? `step ${r.versions[0]}` : `steps ${r.versions[0]}–${r.versions[1]}`) : null;
    const known = r.l.filter(isNumber); // a sampler may not tell them
    const mean = known.length ? known.reduce((sum, v) => sum + v, 0) / known.length / 1e4 : null;
    const rows = [...parts, isNumber(r.advantage) && ["advantage", format.number(r.advantage)], ["tokens", (r.p.length + r.cut).toLocaleString("en-US")], versions && ["sampled by", versions], mean !== null && ["mean logprob", `${format.number(mean)} nats`], r.truncated && ["truncated", "yes"]].filter(Boolean);
    return el("div", { class: "stats" }, rows.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))));
  }

  /** The first lines of a sibling. */
  glance(r, sibling) {
    const host = this.tokens(r, [0, Math.min(r.p.length, 120)], sibling);
    if (!r.p.length) host.append(r.said.map((part) => part.content || "").join("\n").slice(0, 600) || r.error || "(empty)");
    return host;
  }
  tokens(r, [from, to], sibling = this.sibling) {
    const host = el("div", { class: "tokens", "data-sibling": sibling });
    for (let i = from; i < to; i++) host.append(this.token(r, i));
    return host;
  }
  token(r, i) {
    const text = this.pieces()[r.p[i]][1], trained = r.m === 1 || r.m[i] === 1;
    const node = el("span", { class: trained ? "tok" : "tok off", "data-i": i, style: { background: this.tint(r, i) } });
    const lines = text.split("\n");
    lines.forEach((piece, n) => { // line ends are shown and kept
      if (n) node.append(el("span", { class: "ws" }, "↵"), "\n");
      node.append(piece);
    });
    if (text === "") node.append(el("span", { class: "ws" }, "∅"));
    return node;
  }
  tint(r, i) {
    const value = { logprob: r.l[i] === null ? null : r.l[i] / 1e4, advantage: at(r.a, i), difference: r.d[i] === null ? null : r.d[i] / 1e6 }[this.mode];
    if (!isNumber(value)) return "transparent";
    const strength = Math.min(1, Math.abs(value) / this.most[this.mode]);
    const rgb = this.mode === "logprob" ? "violet" : value > 0 ? "blue" : "orange";
    return `rgba(var(--${rgb}-rgb), ${(0.6 * (this.mode === "logprob" ? strength : Math.sqrt(strength))).toFixed(3)})`;
  }

  tip(event) {
    const node = event.target.closest ? event.target.closest(".tok") : null;
    if (!node) return this.hideTip();
    const shown = this.groups()[this.group].shown, r = shown[node.parentNode.dataset.sibling], i = Number(node.dataset.i), [id, text] = this.pieces()[r.p[i]];
    const lp = r.l[i] === null ? null : r.l[i] / 1e4, d = r.d[i] === null ? null : r.d[i] / 1e6, adv = at(r.a, i);
    const rows = [["token id", String(id)], ["place", `${i + 1} of ${r.p.length}`], lp !== null && ["sampler's logprob", `${lp.toFixed(4).replace("-", "−")} (${format.percent1(Math.exp(lp))})`], d !== null && lp !== null && ["trainer's logprob", (lp + d).toFixed(4).replace("-", "−")], d !== null && ["difference", format.number(d)], d !== null && ["ratio", Math.exp(d).toFixed(4)], isNumber(adv) && ["advantage", format.number(adv)], ["trained on", r.m === 1 || r.m[i] === 1 ? "yes" : "no"]].filter(Boolean);
    this.tipNode.replaceChildren(el("code", {}, visible(text)), el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
    this.tipNode.hidden = false;
    const box = node.getBoundingClientRect(), size = this.tipNode.getBoundingClientRect();
    const below = box.bottom + size.height + 12 < window.innerHeight;
    this.tipNode.style.left = `${Math.max(8, Math.min(window.innerWidth - size.width - 8, box.left))}px`;
    this.tipNode.style.top = `${below ? box.bottom + 7 : Math.max(8, box.top - size.height - 7)}px`;
    if (this.on) this.on.classList.remove("on");
    this.on = node;
    node.classList.add("on");
  }
  hideTip() { this.tipNode.hidden = true; if (this.on) this.on.classList.remove("on"); this.on = null; }

  onKey(event) {
    if (event.target.matches("input") || event.altKey || event.ctrlKey || event.metaKey) return;
    const move = { ArrowRight: { sibling: this.sibling + 1 }, ArrowLeft: { sibling: this.sibling - 1 }, ArrowDown: { group: this.group + 1 }, ArrowUp: { group: this.group - 1 }, "]": { step: this.step + 1 }, "[": { step: this.step - 1 }, 1: { mode: "logprob" }, 2: { mode: "advantage" }, 3: { mode: "difference" } }[event.key];
    if (event.key === "Escape") this.hideTip();
    if (!move) return;
    event.preventDefault();
    this.go(move);
    this.node.focus({ preventScroll: true });
  }
}

const at = (values, i) => (Array.isArray(values) ? values[i] : values);
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "→").replace(/^ +| +$/g, (s) => "·".repeat(s.length)));
const sign = (r) => (!isNumber(r.reward) ? "fail" : r.advantage > 0 ? "good" : r.advantage < 0 ? "bad" : "");
function tone(r) {
  const kind = sign(r);
  return kind === "good" ? "rgba(var(--blue-rgb), .75)" : kind === "bad" ? "rgba(var(--orange-rgb), .7)" : "transparent";
}
function message(role, content, prompt) {
  return el("div", { class: `msg${prompt ? " fold" : ""}${role === "tool" ? " tool" : ""}` }, el("div", { class: "who" }, role), el("div", { class: "what" }, content));
}

function which() {
  if (DATA.live) return `${R.total === 1 ? "The one recorded step is" : `All ${R.total.toLocaleString("en-US")} recorded steps are`} here, and those to come.`;
  if (R.steps.length === R.total) return `${R.total === 1 ? "The one recorded step is" : `All ${R.total} recorded steps are`} on this page.`;
  return `${R.steps.length} of ${R.total.toLocaleString("en-US")} recorded steps, evenly chosen, are on this page.`;
}

function rollouts() {
  const before = R;
  R = DATA.rollouts;
  if (before) R.steps.forEach((step, i) => { if (before.steps[i] && before.steps[i].step === step.step) R.steps[i] = before.steps[i]; });
  if (VIEW.browser && R.steps.length) { VIEW.browser.extend(); return VIEW.rollouts; }
  if (!R.steps.length) return el("section", { id: "rollouts" }, el("h2", {}, "Rollouts"), el("p", { class: "lead" }, "This folder holds no rollouts."));
  VIEW.browser = new Browser();
  return VIEW.rollouts = el("section", { id: "rollouts" }, el("h2", {}, "Rollouts"),
    el("p", { class: "lead" }, VIEW.browser.which, " A group is one prompt answered several times; blue answers beat their group's mean, orange ones fell short of it."),
    VIEW.browser.node,
    el("p", { class: "keys", style: { "margin-top": "8px" } }, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " siblings   ", el("kbd", {}, "↑"), " ", el("kbd", {}, "↓"), " groups   ", el("kbd", {}, "["), " ", el("kbd", {}, "]"), " steps   ", el("kbd", {}, "1"), " ", el("kbd", {}, "2"), " ", el("kbd", {}, "3"), " colours"));
}
