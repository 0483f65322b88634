"use strict";
// Draws the charts of a page, and follows its menus. The data are in the element "data" (document.py).
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const pages = await new Response(unpacked).json(); // one for each scenario
const content = document.getElementById("content");
const bodies = [null, ...Array.from(document.querySelectorAll("body > template"), (one) => one.content)];
const root = document.documentElement;
const MOST_ROWS = 500; // of a table on the page; the CSV has all
const PRINT_WIDTH = 690; // pixels of a chart on A4 and on Letter
// Column of a table -> its head on the page, if it is not the name. A CSV file has the names.
const HEADS = {
  round_end: "before round",
  place_end: "before place",
  latency_s: "mean latency (s)",
  low: "lower end",
  high: "upper end",
  selections_per_client: "times selected",
  selections: "times selected",
  clients_per_round: "failed clients per round",
  seconds: "seconds per round",
  round_s: "duration (s)",
  measured_s: "measured (s)",
  beyond_median_s: "beyond the median client (s)",
  beyond_second_s: "beyond the second slowest (s)",
  mean_s: "mean (s)",
  p95_s: "95 % of usable updates (s)",
  share: "share of the rounds",
  last_seen: "last usable update",
  last_reply: "last reply",
  last_selected: "last selected",
  problem_round: "round of the problem",
  slowest: "slowest in (rounds)",
  theta: "seconds lost per round",
  reached: "seeds that reach it",
  pairs: "seeds",
};
const state = { show: new Set(), theme: "" };
const views = {};
let tables = {};
let page = pages[0];
let form = document.getElementById("menus");
let drawing = Promise.resolve();

// ---- data ----
function rowsOf(name) {
  if (!tables[name]) {
    const columns = Object.entries(page.tables[name]);
    const length = columns.length ? columns[0][1].length : 0;
    tables[name] = Array.from({ length }, (_, i) => Object.fromEntries(columns.map(([key, own]) => [key, own[i]])));
  }
  return tables[name];
}

function shownRows(chart) {
  const menus = Object.entries(chart.menus);
  return rowsOf(chart.name).filter(
    (row) => menus.every(([column, menu]) => String(row[column]) === state[menu])
      && (!chart.shown || state.show.has(row[chart.shown])),
  );
}

// Names of the series of a chart. Vega gets their numbers, because a name such as "constructor" would confuse it.
function seriesOf(chart) {
  return chart.series === "selector" ? page.selectors : [...new Set(rowsOf(chart.name).map((row) => row[chart.series]))];
}

// ---- charts ----
function specOf(chart, rows, legend = null) {
  // A function, because "$&" in a replacement text would stand for what it replaces.
  let text = JSON.stringify(chart.spec).replaceAll('"legend":null', () => `"legend":${JSON.stringify(legend)}`);
  for (const [menu, values] of Object.entries(chart.words))
    for (const [old, replacement] of Object.entries(values[state[menu]] ?? {}))
      text = text.replaceAll(JSON.stringify(old), () => JSON.stringify(replacement));
  const spec = JSON.parse(text);
  const labels = seriesOf(chart);
  const numbers = new Map(labels.map((label, i) => [label, i]));
  const own = rows.map((row) => ({ ...row, series: numbers.get(row[chart.series]) ?? null }));
  const params = [...(spec.params ?? []), { name: "labels", value: labels }];
  return { ...spec, params, datasets: { ...spec.datasets, rows: own } };
}

function embed(place, spec) {
  return vegaEmbed(place, spec, {
    mode: "vega-lite", renderer: "svg", actions: false, ast: true, logLevel: 1, // errors only: an empty chart is no problem
  });
}

// What the menus have chosen for a chart, unless the title of an axis says it.
function choiceOf(chart) {
  const names = page.menus.map((one) => one.name).filter((name) => Object.values(chart.menus).includes(name));
  return names.filter((name) => !(name in chart.words)).map(
    (name) => `${name[0].toUpperCase()}${name.slice(1)}: ${form.elements[name].selectedOptions[0].text}.`,
  ).join(" ");
}

async function draw(chart) {
  const figure = document.getElementById(`chart-${chart.name}`);
  const rows = shownRows(chart);
  figure.querySelector(".choice").textContent = choiceOf(chart);
  const place = figure.querySelector(".chart");
  views[chart.name]?.finalize();
  delete views[chart.name];
  figure.querySelector("[data-save=svg]").disabled = !rows.length;
  if (rows.length) {
    views[chart.name] = (await embed(place, specOf(chart, rows))).view;
    place.querySelector("svg").setAttribute("aria-hidden", "true"); // the element around it has the label
  } else place.replaceChildren("There is nothing to show for this choice."); // without rows, a scale has no ends
  if (figure.querySelector("details").open) fillTable(chart, rows);
}

// Numbers with four significant digits; the CSV has more.
function shortText(value) {
  if (typeof value !== "number" || Number.isInteger(value)) return value ?? "";
  return Math.abs(value) >= 1000 ? Math.round(value) : Number(value.toPrecision(4));
}

function fillTable(chart, rows) {
  const place = document.getElementById(`chart-${chart.name}`).querySelector("details .table");
  const table = document.createElement("table");
  const columns = Object.keys(page.tables[chart.name]);
  const head = table.createTHead().insertRow();
  for (const name of columns) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = HEADS[name] ?? name;
    head.append(cell);
  }
  const body = table.createTBody();
  // Of many rows, those of all selectors: every k-th row.
  const step = chart.shown ? Math.ceil(rows.length / MOST_ROWS) : 1;
  const shown = rows.filter((_, i) => i % step === 0).slice(0, MOST_ROWS);
  for (const row of shown) {
    const line = body.insertRow();
    for (const name of columns) line.insertCell().textContent = shortText(row[name]);
  }
  place.replaceChildren(table);
  if (rows.length > MOST_ROWS) {
    const rest = document.createElement("p");
    rest.textContent = step > 1
      ? `${shown.length} of ${rows.length} rows, evenly spread. The CSV has all rows.`
      : `The first ${MOST_ROWS} of ${rows.length} rows. The CSV has all rows.`;
    place.append(rest);
  }
}

// One drawing at a time, so that a later choice is drawn after an earlier one.
function drawAll(charts) {
  drawing = drawing.then(async () => {
    for (const chart of charts) {
      if (!page.charts.includes(chart)) continue; // the scenario has changed
      try {
        await draw(chart);
      } catch (error) {
        document.getElementById("problem").textContent = `The chart ${chart.name} cannot be drawn: ${error.message}`;
        console.error(error);
      }
    }
    root.dataset.drawn = "yes";
  });
  return drawing;
}

// ---- menus and address ----
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  showScenario(pages.find((one) => one.scenario === given.get("scenario")) ?? pages[0]);
  for (const menu of page.menus) {
    const value = given.get(menu.name);
    state[menu.name] = menu.values.includes(value) ? value : menu.values[0];
  }
  state.theme = ["light", "dark"].includes(given.get("theme")) ? given.get("theme") : "";
  const hidden = given.getAll("hide");
  state.show = new Set(page.selectors.filter((name) => !hidden.includes(name)));
}

// Exchanges the content of the page for that of another scenario.
function showScenario(wanted) {
  state.scenario = wanted.scenario;
  if (wanted === page) return;
  for (const name of Object.keys(views)) {
    views[name].finalize();
    delete views[name];
  }
  tables = {};
  bodies[pages.indexOf(page)] = document.createDocumentFragment();
  bodies[pages.indexOf(page)].append(...content.childNodes);
  content.append(bodies[pages.indexOf(wanted)]);
  page = wanted;
  form = document.getElementById("menus");
  document.title = page.title;
}

function writeAddress() {
  const kept = new URLSearchParams();
  if (state.scenario !== pages[0].scenario) kept.set("scenario", state.scenario);
  for (const menu of page.menus) if (state[menu.name] !== menu.values[0]) kept.set(menu.name, state[menu.name]);
  if (state.theme) kept.set("theme", state.theme);
  for (const name of page.selectors) if (!state.show.has(name)) kept.append("hide", name);
  history.replaceState(null, "", `#${kept}`);
}

function showState() {
  root.dataset.theme = state.theme;
  form.elements.theme.value = state.theme;
  if (form.elements.scenario) form.elements.scenario.value = state.scenario;
  for (const menu of page.menus) form.elements[menu.name].value = state[menu.name];
  for (const box of form.querySelectorAll("[name=show]")) box.checked = state.show.has(box.value);
}

function changed(event) {
  const { name, value, checked } = event.target;
  if (!form.contains(event.target)) return;
  if (name === "show") state.show[checked ? "add" : "delete"](value);
  else state[name] = value;
  writeAddress();
  if (name === "scenario") {
    start(); // the other menus keep those values that the scenario has
    form.elements.scenario.focus();
    return;
  }
  showState();
  if (name === "theme") return;
  drawAll(page.charts.filter(
    (chart) => (name === "show" ? chart.shown : Object.values(chart.menus).includes(name) || name in chart.words),
  ));
}

// ---- downloads ----
function csvText(chart) {
  const columns = Object.keys(page.tables[chart.name]);
  // A spreadsheet would compute a text that begins like a formula. Numbers stay as they are.
  const plain = (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? ""));
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', () => '""')}"` : value);
  const lines = shownRows(chart).map((row) => columns.map((name) => cell(plain(row[name]))).join(","));
  return [columns.map(cell).join(","), ...lines, ""].join("\n");
}

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function saveChart(chart, kind) {
  if (kind === "csv") save(`${chart.name}.csv`, "text/csv", csvText(chart));
  else save(`${chart.name}.svg`, "image/svg+xml", await svgText(chart));
}

// The menu of selectors is the page's legend, which a file does not have.
async function svgText(chart) {
  if (!chart.shown) return views[chart.name].toSVG();
  const values = [...page.selectors.keys()].filter((i) => state.show.has(page.selectors[i]));
  const legend = { title: null, orient: "bottom", columns: 6, labelExpr: "labels[datum.value]", values };
  const width = document.getElementById(`chart-${chart.name}`).clientWidth;
  const result = await embed(document.createElement("div"), { ...specOf(chart, shownRows(chart), legend), width });
  const text = await result.view.toSVG();
  result.view.finalize();
  return text;
}

async function copy(button) {
  const text = button.closest("details").querySelector("pre");
  const range = document.createRange();
  range.selectNodeContents(text);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    document.execCommand("copy"); // where the page may not use the clipboard, the text stays selected
  }
  button.textContent = "Copied";
}

// The height of the menus, for the place of a heading after a click on its link.
new ResizeObserver(() => root.style.setProperty("--bar", `${document.getElementById("menus").offsetHeight + 8}px`))
  .observe(document.body);

// ---- start ----
function chartOf(element) {
  const figure = element.closest("figure");
  return page.charts.find((one) => `chart-${one.name}` === figure?.id);
}

function start() {
  readAddress();
  showState();
  return drawAll(page.charts);
}

content.addEventListener("click", (event) => {
  if (event.target.dataset.save) saveChart(chartOf(event.target), event.target.dataset.save);
  if ("copy" in event.target.dataset) copy(event.target);
});
content.addEventListener("toggle", (event) => {
  const chart = chartOf(event.target);
  if (chart) fillTable(chart, shownRows(chart));
}, true); // this event does not bubble
content.addEventListener("change", changed);
content.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => {
  if (document.getElementById(location.hash.slice(1))) return; // a link to a section
  start();
});
addEventListener("beforeprint", () => Object.values(views).forEach((view) => view.width(PRINT_WIDTH).run()));
addEventListener("afterprint", () => dispatchEvent(new Event("resize")));
start();
// For tests and for readers of the console.
window.fedsel = { state, views, chartOf: (name) => page.charts.find((one) => one.name === name), shownRows: (name) => shownRows(page.charts.find((one) => one.name === name)) };
