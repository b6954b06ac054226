// Keeps the page up to date and draws the curves. The page works without it, too.
"use strict";

const FASTEST = 5000, SLOWEST = 30000, AFTER_ERROR = 60000; // milliseconds between two requests
const content = document.getElementById("content");
const connection = document.getElementById("connection");
const logarithmic = new Set(); // metrics that are drawn on a logarithmic scale
let series = {}, charts = [], tag = "", delay = FASTEST, timer = 0, sorted = null;

// Airflow's theme, which its UI stores in this browser
function applyTheme() {
  let theme = null;
  try { theme = localStorage.getItem("theme"); } catch { /* the sandbox may forbid it */ }
  const dark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawCharts() {
  const place = content.querySelector(".charts");
  charts.forEach((chart) => chart.destroy());
  charts = [];
  if (!place || !window.uPlot) return;
  place.replaceChildren();
  for (const [name, [steps, values]] of Object.entries(series)) {
    if (steps.length < 2) continue;
    const box = document.createElement("div");
    const title = document.createElement("h3");
    const scale = document.createElement("button");
    const log = logarithmic.has(name);
    box.className = "chart";
    title.append(name);
    scale.type = "button";
    scale.className = "scale";
    scale.textContent = log ? "linear" : "log";
    scale.setAttribute("aria-label", `${name}: ${log ? "linear" : "logarithmic"} scale`);
    scale.addEventListener("click", () => {
      log ? logarithmic.delete(name) : logarithmic.add(name);
      drawCharts();
    });
    title.append(scale);
    box.append(title);
    place.append(box);
    const drawn = values.map((value) => (typeof value === "number" && (!log || value > 0) ? value : null));
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
    charts.push(new uPlot({
      width: box.clientWidth, height: 200,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...axis }, { ...axis, size: 64 }],
      series: [{ label: "step" }, { label: name, stroke: color("--busy"), width: 2, spanGaps: false }],
    }, [steps.map(Number), drawn], box));
    const odd = values.map((value, i) => [value, steps[i]]).filter(([value]) => typeof value !== "number");
    const text = document.createElement("p");
    text.className = "quiet";
    text.textContent = odd.slice(0, 5).map(([value, step]) => `${value} at step ${step}`).join(", ")
      + (odd.length > 5 ? ` and ${odd.length - 5} more` : "");
    box.append(text);
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `Curve of ${name}; its last and best values are in the table below`);
  }
}

function showAge() {
  const age = document.getElementById("age");
  if (!age) return;
  const seconds = Math.max(Math.round(Date.now() / 1000 - age.dataset.written), 0);
  const text = seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  age.textContent = `The data is ${text} old.`;
}

function layOut() {
  for (const item of content.querySelectorAll("[data-share]")) item.style.flexGrow = Math.max(item.dataset.share, 1);
  drawCharts();
  if (sorted) sortRows(sorted.column, sorted.descending);
}

function sortRows(column, descending) {
  const table = content.querySelector("table.sortable");
  if (!table) return;
  sorted = { column, descending };
  const value = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
  const compare = (a, b) => value(a).localeCompare(value(b), undefined, { numeric: true });
  const rows = [...table.tBodies[0].rows].sort((a, b) => (descending ? compare(b, a) : compare(a, b)));
  table.tBodies[0].append(...rows);
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

async function update() {
  let active = true;
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(document.body.dataset.update, { headers, credentials: "same-origin", cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      connection.textContent = "You are logged out, or no longer have the right to see this. Reload the page.";
      return;
    }
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const data = await answer.json();
      tag = answer.headers.get("ETag") ?? "";
      series = data.series ?? {};
      active = data.active;
      const focused = document.activeElement?.getAttribute("aria-label");
      const open = [...content.querySelectorAll("details")].map((details) => details.open);
      content.innerHTML = data.html; // escaped by the server
      content.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? false; });
      layOut();
      if (focused) content.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
      delay = FASTEST;
    } else {
      delay = Math.min(delay * 1.5, SLOWEST);
    }
    connection.textContent = "";
    showAge();
  } catch {
    delay = AFTER_ERROR;
    connection.textContent = "Airflow can't be reached. Trying again in a minute.";
  }
  clearTimeout(timer);
  if (active && !document.hidden) timer = setTimeout(update, delay);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) { delay = FASTEST; update(); }
});
content.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.classList.contains("copy")) {
    navigator.clipboard?.writeText(button.parentElement.querySelector("code").textContent)
      .then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Can't copy"; });
  }
  const heading = button?.closest("table.sortable th");
  if (heading) sortRows(heading.cellIndex, sorted?.column === heading.cellIndex && !sorted.descending);
});
addEventListener("resize", () => charts.forEach((chart) => {
  chart.setSize({ width: chart.root.parentElement.clientWidth, height: 200 });
}));
addEventListener("storage", (event) => { if (event.key === "theme") { applyTheme(); drawCharts(); } });

applyTheme();
if (window.top !== window) document.documentElement.classList.add("framed");
layOut();
update();
