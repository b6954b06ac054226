// Keeps the page up to date. The page works without it, too.
"use strict";

const FASTEST = 5000, SLOWEST = 30000, AFTER_ERROR = 60000; // milliseconds between two requests
const content = document.getElementById("content");
const connection = document.getElementById("connection");
let series = {}, served = new Map(), tag = "", delay = FASTEST, timer = 0, sorted = null, unreachable = false;
let servedAt = NaN, receivedAt = 0; // epoch seconds by the server's clock, and milliseconds by performance.now()

// The server's time in epoch seconds, from the last answer's Date header; NaN before the first one. The browser's clock may be wrong.
function serverTime() {
  return servedAt + (performance.now() - receivedAt) / 1000;
}

function noteServerTime(answer) {
  const date = Date.parse(answer.headers.get("Date"));
  if (!Number.isNaN(date)) [servedAt, receivedAt] = [date / 1000, performance.now()];
}

// As format_duration does in Python: the two largest units.
function duration(seconds) {
  let rest = Math.max(Math.round(seconds), 0);
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].map(([unit, size]) => {
    const count = Math.floor(rest / size);
    rest %= size;
    return [count, unit];
  });
  const found = parts.findIndex(([count]) => count), first = found < 0 ? parts.length - 1 : found;
  return parts.slice(first, first + 2).filter(([count], i) => count || !i).map((part) => part.join(" ")).join(" ");
}

// Lets durations run on: see `Ticking` in views.py.
function showDurations() {
  const now = serverTime();
  if (Number.isNaN(now)) return; // the texts are the server's
  for (const { dataset, firstChild } of content.querySelectorAll("[data-at]")) {
    firstChild.nodeValue = duration(Number(dataset.seconds) + dataset.rate * (now - dataset.at));
  }
}

function layOut() {
  for (const item of content.querySelectorAll("[data-share]")) item.style.flexGrow = Math.max(item.dataset.share, 1);
  showCharts(content.querySelector(".charts"), series);
  if (sorted) sortRows(sorted.column, sorted.descending);
  showDurations();
  document.dispatchEvent(new Event("laidout"));
}

// A number if the text is one, else the text; what is neither, such as NaN or nothing, comes last.
function sortKey(row, column) {
  const text = row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
  return text === "" || text === "NaN" ? null : Number.isNaN(Number(text)) ? text : Number(text);
}

function compareKeys(a, b, descending) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return descending ? -order : order;
}

function sortRows(column, descending) {
  const table = content.querySelector("table.sortable");
  sorted = { column, descending };
  if (!table) return;
  const rows = [...table.tBodies[0].rows].sort((a, b) => compareKeys(sortKey(a, column), sortKey(b, column), descending));
  table.tBodies[0].append(...rows);
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

// What identifies an element after its part of the page was replaced.
function nameOf(item) {
  return item && content.contains(item) ? [item.tagName, item.getAttribute("href") ?? item.getAttribute("aria-label") ?? item.textContent] : null;
}

function focusOn(name) {
  if (!name || content.contains(document.activeElement)) return;
  [...content.querySelectorAll(name[0])].find((item) => nameOf(item)[1] === name[1])?.focus({ preventScroll: true });
}

// Replaces only the parts of the page that have changed, so that selected text and scroll positions of others stay.
function replaceParts(html) {
  const parts = new DOMParser().parseFromString(html, "text/html").body.children; // escaped by the server
  const focused = nameOf(document.activeElement), phase = phaseShown(), before = served;
  served = new Map();
  let place = content.firstElementChild;
  for (const part of [...parts]) {
    const old = document.getElementById(part.id);
    served.set(part.id, part.outerHTML);
    if (old && before.get(part.id) === part.outerHTML) {
      while (place !== old) place = removed(place);
      place = old.nextElementSibling;
    } else {
      keepState(old, part);
      content.insertBefore(document.adoptNode(part), place);
    }
  }
  while (place) place = removed(place);
  layOut();
  focusOn(focused);
  if (phase && phaseShown() && phase !== phaseShown()) connection.textContent = `The phase is now ${phaseShown()}.`;
}

function phaseShown() {
  return content.querySelector("[data-phase]")?.dataset.phase;
}

function removed(item) {
  const next = item.nextElementSibling;
  item.remove();
  return next;
}

// Which details are open, and how far tables are scrolled.
function keepState(old, part) {
  const open = [...(old?.querySelectorAll("details") ?? [])].map((details) => details.open);
  part.querySelectorAll("details").forEach((details, i) => { details.open = open[i] ?? details.open; });
  const scrolled = (old?.matches(".wide") ? old : old?.querySelector(".wide"))?.scrollLeft;
  if (scrolled) requestAnimationFrame(() => { (part.matches(".wide") ? part : part.querySelector(".wide"))?.scrollTo(scrolled, 0); });
}

async function update() {
  let active = true;
  clearTimeout(timer);
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(document.body.dataset.update, { headers, credentials: "same-origin", cache: "no-store" });
    noteServerTime(answer);
    if (answer.status === 401 || answer.status === 403) {
      connection.textContent = "You are logged out, or no longer have the right to see this. Reload the page.";
      return;
    }
    if (answer.status === 404) {
      connection.textContent = "Airflow has no such task instance any more. Its run may have been deleted.";
      return;
    }
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const data = await answer.json();
      tag = answer.headers.get("ETag") ?? "";
      series = data.series ?? {};
      [labels, marksEnds] = [data.labels ?? [], Boolean(data.marks)];
      active = data.active;
      replaceParts(data.html);
      delay = FASTEST;
    } else {
      delay = Math.min(delay * 1.5, SLOWEST);
    }
    if (unreachable) connection.textContent = "";
    unreachable = false;
  } catch {
    unreachable = true;
    delay = AFTER_ERROR;
    connection.textContent = "Airflow can't be reached. The next attempt is in a minute.";
  }
  clearTimeout(timer);
  if (active && !document.hidden) timer = setTimeout(update, delay);
}

// The clipboard's API exists only with TLS and on localhost.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", "hidden", text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

async function copyCommand(button) {
  const done = await copy(button.parentElement.querySelector("code").textContent);
  button.focus();
  button.textContent = done ? "Copied" : "Can't copy";
  connection.textContent = done ? "The command was copied." : "The browser doesn't allow copying.";
  setTimeout(() => { button.textContent = "Copy"; connection.textContent = ""; }, 5000);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && document.body.dataset.update) { delay = FASTEST; update(); }
});
content.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.classList.contains("copy")) copyCommand(button);
  const heading = button?.closest("table.sortable th");
  if (heading) sortRows(heading.cellIndex, sorted?.column === heading.cellIndex && !sorted.descending);
});
addEventListener("resize", resizeCharts);
addEventListener("storage", (event) => { if (event.key === "theme") { applyTheme(); redrawCharts(); } });

applyTheme(); // it may have changed while the scripts were loaded
layOut();
setInterval(() => { if (!document.hidden) showDurations(); }, 1000);
if (document.body.dataset.update && !document.hidden) update();
