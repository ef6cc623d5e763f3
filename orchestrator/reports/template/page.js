"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const [ROW, SWEEP, REST, OUTCOME, MARGIN, SECONDS, MESSAGE, SHARD, COMMAND] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const SQUARES = 240; // more subtests than this in one cell are drawn as a share of it
const form = document.getElementById("filters");
const table = document.getElementById("matrix");
const dialog = document.getElementById("detail");
const chosen = new Set();

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") element.textContent = value;
    else if (name === "fill") element.style.background = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function breakable(name) { // a long name may break after an underscore
  return name.split(/(?<=_)/).flatMap((part) => [make("wbr"), part]);
}

const idOf = (subtest) => [...DATA.rows[subtest[ROW]], DATA.sweeps[subtest[SWEEP]], subtest[REST]].join(".");
const outcomeOf = (subtest) => DATA.outcomes[subtest[OUTCOME]];

function visible() {
  const { method, backend, sweep, text } = Object.fromEntries(new FormData(form));
  const words = (text || "").toLowerCase().split(/\s+/).filter(Boolean);
  return DATA.subtests.filter((subtest) => {
    const [m, b] = DATA.rows[subtest[ROW]];
    return (!method || m === method) && (!backend || b === backend)
      && (!sweep || DATA.sweeps[subtest[SWEEP]] === sweep)
      && (!chosen.size || chosen.has(outcomeOf(subtest)[0]))
      && (!words.length || words.every((word) => idOf(subtest).includes(word)));
  });
}

function heat(share) {
  const percent = Math.round(Math.min(1, Math.max(0, share)) * 100);
  return `color-mix(in oklab, var(--heat1) ${percent}%, var(--heat0))`;
}

function colourOf(subtest, mode, slowest) {
  if (mode === "margin") return subtest[MARGIN] === null ? "var(--line)"
    : subtest[MARGIN] > 1 ? "var(--failed)" : heat(subtest[MARGIN]);
  if (mode === "duration") return heat(Math.log1p(subtest[SECONDS] * 100) / Math.log1p(slowest * 100 || 1));
  return `var(--${outcomeOf(subtest)[0]})`;
}

function cellOf(subtests, mode, slowest) {
  const waffle = make("span", { class: "waffle", "aria-hidden": "true" });
  const step = Math.max(1, Math.ceil(subtests.length / SQUARES));
  const sorted = [...subtests].sort((a, b) => a[OUTCOME] - b[OUTCOME]);
  for (let at = 0; at < sorted.length; at += step) {
    const [name, , expected] = outcomeOf(sorted[at]);
    const loud = mode !== "outcome" && !expected ? " loud" : "";
    waffle.append(make("i", { class: name + loud, fill: colourOf(sorted[at], mode, slowest) }));
  }
  const bad = subtests.filter((subtest) => !outcomeOf(subtest)[2]).length;
  const count = make("span", { class: "count", text: `${subtests.length}` });
  if (bad) count.append(" ", make("b", { text: `${bad} ✗` }));
  return [waffle, count];
}

function describe(subtests) {
  const counts = new Map();
  for (const subtest of subtests) counts.set(subtest[OUTCOME], (counts.get(subtest[OUTCOME]) || 0) + 1);
  return [...counts].sort((a, b) => a[0] - b[0]).map(([outcome, n]) => `${n} ${DATA.outcomes[outcome][1]}`).join(", ");
}

function paint() {
  const subtests = visible();
  const mode = new FormData(form).get("colour");
  const slowest = DATA.subtests.reduce((most, subtest) => Math.max(most, subtest[SECONDS]), 0);
  const cells = new Map();
  for (const subtest of subtests) {
    const key = subtest[ROW] * 10000 + subtest[SWEEP];
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(subtest);
  }
  const columns = DATA.sweeps.map((_, at) => at).filter((at) => subtests.some((subtest) => subtest[SWEEP] === at));
  const head = make("tr", {}, make("td"), ...columns.map((at) => make("th", { scope: "col" }, ...breakable(DATA.sweeps[at]))));
  const body = make("tbody");
  let last = null;
  DATA.rows.forEach(([method, backend], row) => {
    const mine = columns.map((column) => cells.get(row * 10000 + column));
    if (!mine.some(Boolean)) return;
    const label = make("th", { scope: "row" }, make("span", { text: `${method} ` }), backend);
    const line = make("tr", { class: method === last ? "" : "first" }, label);
    last = method;
    mine.forEach((group, at) => {
      const cell = make("td");
      if (group) {
        const name = `${method} ${backend}, ${DATA.sweeps[columns[at]]}: ${describe(group)}`;
        const button = make("button", { type: "button", tabindex: "-1", "aria-label": name, title: name });
        button.append(...cellOf(group, mode, slowest));
        button.addEventListener("click", () => open(name, group));
        cell.append(button);
      }
      line.append(cell);
    });
    body.append(line);
  });
  table.replaceChildren(make("thead", {}, head), body);
  const first = table.querySelector("td button");
  if (first) first.tabIndex = 0;
  document.getElementById("shown").textContent = `${subtests.length} of ${DATA.subtests.length} subtests shown`;
  paintChips();
  histogram("margins", subtests.map((s) => s[MARGIN]).filter((value) => value !== null), linearBins(), true);
  histogram("durations", subtests.map((s) => s[SECONDS]).filter((value) => value > 0), decadeBins(), false);
  remember();
}

function paintChips() {
  const counts = new Map();
  for (const subtest of DATA.subtests) counts.set(subtest[OUTCOME], (counts.get(subtest[OUTCOME]) || 0) + 1);
  const chips = DATA.outcomes.map(([name, phrase], at) => {
    if (!counts.has(at)) return null;
    const chip = make("button", { type: "button", "aria-pressed": String(chosen.has(name)), "data-outcome": name },
      make("span", { class: `dot ${name}`, fill: `var(--${name})` }), `${phrase} ${counts.get(at)}`);
    chip.addEventListener("click", () => {
      if (!chosen.delete(name)) chosen.add(name);
      paint();
      document.querySelector(`[data-outcome="${name}"]`).focus();
    });
    return chip;
  });
  document.getElementById("chips").replaceChildren(...chips.filter(Boolean));
}

function linearBins() {
  const bins = Array.from({ length: 20 }, (_, at) => ({ low: at / 20, high: (at + 1) / 20, label: at % 4 ? "" : `${at / 20}` }));
  return [...bins, { low: 1, high: Infinity, label: "> 1", over: true }];
}

function decadeBins() {
  const bins = [];
  for (let power = -12; power < 12; power += 1) { // a quarter of a decade each: 1 ms to 1000 s
    const low = 10 ** (power / 4);
    bins.push({ low: power === -12 ? 0 : low, high: power === 11 ? Infinity : 10 ** ((power + 1) / 4),
      label: power % 4 ? "" : `${Number(low.toPrecision(1))}` });
  }
  return bins;
}

function histogram(where, values, bins, mark) {
  const width = 400, height = 110, base = 92;
  const counts = bins.map((bin) => values.filter((value) => value >= bin.low && value < bin.high).length);
  const most = Math.max(1, ...counts);
  const step = width / bins.length;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${values.length} values` });
  svg.append(draw("line", { x1: 0, x2: width, y1: base, y2: base }));
  bins.forEach((bin, at) => {
    const tall = counts[at] ? Math.max(2, (base - 14) * counts[at] / most) : 0;
    const bar = draw("rect", { x: at * step + 1, y: base - tall, width: step - 2, height: tall, class: bin.over && mark ? "over" : "" });
    bar.append(draw("title", {}, `${Number(bin.low.toPrecision(3))} to ${Number(bin.high.toPrecision(3))}: ${counts[at]}`));
    svg.append(bar);
    if (bin.label) svg.append(draw("text", { x: at * step + 1, y: base + 13 }, bin.label));
  });
  svg.append(draw("text", { x: width, y: 10, "text-anchor": "end" }, `most: ${most}`));
  document.getElementById(where).replaceChildren(svg);
}

function open(title, subtests) {
  document.getElementById("detail-title").textContent = title;
  const sorted = [...subtests].sort((a, b) => a[OUTCOME] - b[OUTCOME] || (b[MARGIN] || 0) - (a[MARGIN] || 0));
  document.getElementById("detail-body").replaceChildren(...sorted.slice(0, 500).map(entry));
  if (sorted.length > 500) document.getElementById("detail-body").append(`and ${sorted.length - 500} more: use the filters`);
  dialog.showModal();
}

function entry(subtest) {
  const [name, phrase] = outcomeOf(subtest);
  const meta = [`${subtest[SECONDS]} s`, `shard ${subtest[SHARD]}`];
  if (subtest[MARGIN] !== null) meta.unshift(`${subtest[MARGIN]} of its tolerance`);
  const box = make("div", { class: "subtest" }, make("div", { class: "line" },
    make("span", { class: `dot ${name}`, fill: `var(--${name})` }), make("strong", { text: phrase }),
    make("code", { text: idOf(subtest) }), make("span", { class: "meta", text: meta.join(" · ") })));
  if (subtest[MESSAGE] >= 0) box.append(make("pre", { text: DATA.messages[subtest[MESSAGE]] }));
  const command = subtest[COMMAND] || `${DATA.rerun} ${idOf(subtest)}`;
  const copy = make("button", { type: "button", text: "copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "copied";
    } catch { // a page opened from a file may not write to the clipboard: select the text instead
      getSelection().selectAllChildren(copy.previousSibling);
    }
  });
  box.append(make("div", { class: "command" }, make("pre", { text: command }), copy));
  return box;
}

function move(button, down, right) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1).map((cell) => cell.querySelector("button")));
  let y = rows.findIndex((row) => row.includes(button));
  let x = rows[y].indexOf(button);
  do {
    y += down;
    x += right;
    if (!rows[y] || x < 0 || x >= rows[y].length) return;
  } while (!rows[y][x]);
  button.tabIndex = -1;
  rows[y][x].tabIndex = 0;
  rows[y][x].focus();
}

function remember() {
  const state = new URLSearchParams([...new FormData(form)].filter(([name, value]) => value && !(name === "colour" && value === "outcome")));
  if (chosen.size) state.set("outcome", [...chosen].join(","));
  history.replaceState(null, "", state.size ? `#${state}` : location.pathname + location.search);
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of state) {
    if (name === "outcome") value.split(",").filter((n) => DATA.outcomes.some((o) => o[0] === n)).forEach((n) => chosen.add(n));
    else if (form.elements[name]) form.elements[name].value = value;
  }
}

function fill(name, values) {
  const options = [...new Set(values)].map((value) => make("option", { value, text: value }));
  form.elements[name].append(make("option", { value: "", text: "all" }), ...options);
}

fill("method", DATA.rows.map(([method]) => method));
fill("backend", DATA.rows.map(([, backend]) => backend));
fill("sweep", DATA.sweeps);
restore();
form.addEventListener("input", paint);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => { chosen.clear(); setTimeout(paint); });
document.getElementById("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
table.addEventListener("keydown", (event) => {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!steps[event.key] || event.target.tagName !== "BUTTON") return;
  event.preventDefault();
  move(event.target, ...steps[event.key]);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || dialog.open || event.target.tagName === "INPUT") return;
  event.preventDefault();
  form.elements.text.focus();
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
paint();
