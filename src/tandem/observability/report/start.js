// What begins: a report draws the data in it, a live page asks for them again and again.

const app = document.getElementById("app");
const BUILD = { head, now, alarms, cards, toolbar, curves, rollouts, answers, numbers, recipe, foot: () => el("footer", {}, DATA.live ? "" : `Made by Tandem from the run folder on ${new Date(1000 * DATA.made).toLocaleString()}. This page loads nothing from the network.`) };
/** Which sections a part of the data is shown in. */
const SHOWN = { now: ["now"], curves: ["head", "cards", "curves", "numbers"], events: ["head", "alarms", "curves", "numbers"], rollouts: ["rollouts"], answers: ["answers"], recipe: ["recipe"] };
const sections = {};

function build(name) {
  const fresh = BUILD[name]() || el("div", { hidden: true }), old = sections[name];
  if (old && old !== fresh && !old.contains(document.activeElement)) {
    const open = new Map([...old.querySelectorAll("details")].map((d) => [d.firstChild.textContent, d.open]));
    fresh.querySelectorAll("details").forEach((d) => { if (open.has(d.firstChild.textContent)) d.open = open.get(d.firstChild.textContent); });
    old.replaceWith(fresh);
  }
  if (!old || fresh.isConnected || !old.isConnected) sections[name] = fresh;
  return fresh;
}

function drawRun() {
  take({});
  app.replaceChildren(...Object.keys(BUILD).map(build));
  VIEW.plots.forEach((plot) => plot.draw()); // at once: a page that is printed or saved may never get a frame of its own
}

// ---- live

const query = new URLSearchParams(location.search), SECONDS = 1;
const trouble = el("p", { class: "notice", hidden: true, role: "status" });
const form = el("form", { class: "row", hidden: true, onsubmit: (e) => { e.preventDefault(); sessionStorage.setItem("key", form.querySelector("input").value); } },
  el("label", { class: "row" }, "Key", el("input", { type: "password", class: "search", autocomplete: "off" })), el("button", {}, "Show"));

async function ask(path, values) {
  const key = sessionStorage.getItem("key"), headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`${path}?${new URLSearchParams(values)}`, { headers, cache: "no-store" });
  form.hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

const marks = {};
async function lookAtRun() {
  const told = await ask("run", { name: query.get("run") }), first = !sections.head;
  const news = Object.keys(told.marks).filter((part) => marks[part] !== String(told.marks[part]));
  const parts = await Promise.all(news.map((part) => ask("part", { name: told.name, part })));
  Object.assign(DATA, { name: told.name, diagnosis: told.diagnosis, now: told.now }, ...parts);
  news.forEach((part) => { marks[part] = String(told.marks[part]); });
  document.title = `${told.name} · Tandem`;
  if (first) return drawRun();
  take({});
  new Set(["now", ...news].flatMap((part) => SHOWN[part])).forEach(build);
}

let seen = "";
async function lookAtRuns() {
  const wanted = query.getAll("compare");
  const found = wanted.length ? await ask("compare", query) : await ask("runs", {});
  if (seen === JSON.stringify(found)) return;
  seen = JSON.stringify(found);
  app.replaceChildren(...(wanted.length ? comparePage : runsPage)(found));
  VIEW.plots.forEach((plot) => plot.draw());
}

async function live() {
  const key = /^#key=(.+)/.exec(location.hash);
  if (key) { sessionStorage.setItem("key", decodeURIComponent(key[1])); history.replaceState(null, "", location.pathname + location.search); }
  app.before(el("div", { class: "trouble" }, trouble, form));
  for (;;) {
    try {
      await (query.get("run") ? lookAtRun() : lookAtRuns());
      trouble.hidden = true;
      document.documentElement.dataset.ready = "yes";
    } catch (error) {
      trouble.textContent = error instanceof TypeError && /fetch/i.test(error.message) ? "tandem watch does not answer; it has ended, or the tunnel is closed" : error.message;
      trouble.hidden = false;
    }
    do await new Promise((wake) => { setTimeout(wake, 1000 * SECONDS); }); while (document.hidden);
  }
}

if (DATA.live) live();
else {
  drawRun();
  document.documentElement.dataset.ready = "yes";
}
