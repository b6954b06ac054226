// The curves of the metrics. A chart is kept while the page is updated, so that it doesn't flicker.
"use strict";

const CHART_HEIGHT = 180, MAX_ODD_SHOWN = 5;
const LARGEST = 1e30, SMALLEST = 1e-18; // uPlot has no ticks for larger values; it hangs on a logarithmic scale with much smaller ones
const NARROWEST = 1e-12; // a range that is narrower, as a part of its numbers, has no ticks: uPlot would look for them for ever
const charts = new Map(); // by metric: box, plot, readout, odd, uplot, steps, lines: values by line
const DASHES = [[], [8, 4], [2, 3]]; // lines differ not by their color alone
let labels = [], marksEnds = false; // of the lines, if there are several; whether to mark where each but the last ends
const logarithmic = new Set(); // metrics that are drawn on a logarithmic scale

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function formatNumber(value) {
  if (typeof value !== "number") return Number.isFinite(Number(value)) ? formatNumber(Number(value)) : String(value); // "1e+300"
  const rounded = Number(value.toPrecision(4)), size = Math.abs(rounded);
  if (rounded && (size < 1e-3 || size >= 1e6)) return rounded.toExponential().replace("e+", "e");
  return rounded.toLocaleString("en", { maximumFractionDigits: 6 });
}

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

function makeChart(name) {
  const chart = {
    plot: element("div", "plot"), readout: element("span", "quiet"), odd: element("p", "odd attention"),
    hint: element("p", "odd quiet"), scale: element("button", "scale", "log"), uplot: null, steps: [], lines: [],
  };
  chart.scale.type = "button";
  chart.scale.setAttribute("aria-label", `Logarithmic scale for ${name}`);
  chart.scale.addEventListener("click", () => {
    if (!logarithmic.delete(name)) logarithmic.add(name);
    redraw(name, chart);
    describe(name, chart);
  });
  chart.plot.setAttribute("role", "img");
  const title = element("h3", "", name);
  chart.box = element("div", "chart", element("div", "chart-head", title, chart.readout, chart.scale), chart.plot, chart.odd, chart.hint);
  return chart;
}

function showValue(chart, index) {
  const hovered = index !== null && index !== undefined;
  const found = chart.lines.map((values, i) => [labels[i], hovered ? values[index] : values.findLast((value) => value !== null)]);
  const text = found.filter(([, value]) => value !== null && value !== undefined).map(([label, value]) => `${named(chart, label)}${formatNumber(value)}`).join(", ");
  chart.readout.textContent = `${text}${hovered ? ` at step ${formatNumber(chart.steps[index])}` : ""}`;
}

// The label of a line, before what is said about it; nothing for the only one.
function named(chart, label) {
  return chart.lines.length > 1 ? `${label}: ` : "";
}

// The points that are drawn: those between gaps, or the end of a try that broke.
function pointsOf(chart, i) {
  if (chart.lines.length < 2) return { fill: color("--card") };
  const last = chart.lines[i].findLastIndex((value) => value !== null), broke = marksEnds && i < chart.lines.length - 1;
  return { show: broke, size: 11, width: 3, fill: color("--card"), filter: () => (broke && last >= 0 ? [last] : null) };
}

// Draws a chart from nothing: its scale, the theme or its place has changed.
function redraw(name, chart) {
  const log = logarithmic.has(name);
  chart.uplot?.destroy();
  chart.scale.setAttribute("aria-pressed", String(log));
  const axis = {
    stroke: color("--quiet"), font: "12px sans-serif", values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatNumber(tick))),
    grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1, size: 5 },
  };
  const line = (_, i) => ({
    label: labels[i] ?? name, stroke: color(`--line-${i % 10}`), width: 2, dash: DASHES[i % DASHES.length],
    spanGaps: chart.lines.length > 1, points: pointsOf(chart, i), // lines have different steps
  });
  chart.uplot = new uPlot({
    width: Math.max(chart.plot.clientWidth, 100), height: CHART_HEIGHT, legend: { show: false },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 60 }],
    series: [{}, ...chart.lines.map(line)],
    cursor: { y: false, drag: { x: true, y: false } },
    hooks: { setCursor: [(uplot) => showValue(chart, uplot.cursor.idx)] },
  }, points(name, chart), chart.plot);
}

function isDrawn(value, log) {
  return typeof value === "number" && Math.abs(value) <= LARGEST && (!log || value >= SMALLEST);
}

function isRange(lowest, highest) {
  return highest - lowest > Math.max(Math.abs(lowest), Math.abs(highest)) * NARROWEST;
}

// What uPlot draws: values that it or the scale can't show are gaps. Values in too narrow a range are drawn as one.
function points(name, { steps, lines }) {
  const log = logarithmic.has(name), drawn = lines.map((values) => values.map((value) => (isDrawn(value, log) ? value : null)));
  const shown = drawn.flat().filter((value) => value !== null);
  if (!shown.length || isRange(Math.min(...shown), Math.max(...shown))) return [steps, ...drawn];
  return [steps, ...drawn.map((values) => values.map((value) => (value === null ? null : shown[0])))];
}

function describe(name, chart) {
  const { steps, lines } = chart, values = lines.flat().filter((value) => value !== null);
  const odd = lines.flatMap((line, n) => line.map((value, i) => [value, steps[i], named(chart, labels[n])])).filter(([value]) => value !== null && !isDrawn(value, false));
  chart.odd.textContent = odd.slice(0, MAX_ODD_SHOWN).map(([value, step, label]) => `${label}${formatNumber(value)} at step ${formatNumber(step)}`).join(", ")
    + (odd.length > MAX_ODD_SHOWN ? ` and ${odd.length - MAX_ODD_SHOWN} more` : "");
  const belowScale = logarithmic.has(name) ? values.filter((value) => isDrawn(value, false) && !isDrawn(value, true)).length : 0;
  chart.hint.textContent = belowScale ? `${belowScale} of ${values.length} values are too small for a logarithmic scale.` : "";
  chart.plot.setAttribute("aria-label", `Curve of ${name} from step ${formatNumber(steps[0])} to ${formatNumber(steps.at(-1))}, last value ${formatNumber(values.at(-1))}`);
  showValue(chart, chart.uplot?.cursor.idx);
}

// Shows the series in `place`. `series`: {name: [steps, values of each line]}, where null is no value.
function showCharts(place, series) {
  for (const [name, chart] of charts) {
    if (place && (series[name]?.[0].length ?? 0) > 1) continue;
    chart.uplot?.destroy();
    chart.box.remove();
    charts.delete(name);
  }
  if (!place || !window.uPlot) return;
  for (const [name, [steps, ...lines]] of Object.entries(series)) {
    if (steps.length < 2) continue;
    const known = charts.get(name), chart = known ?? makeChart(name), numbers = steps.map(Number);
    const from = isRange(numbers[0], numbers.at(-1)) ? 0 : -1; // too narrow a range is drawn as one point
    const same = chart.lines.length === lines.length;
    chart.steps = numbers.slice(from);
    chart.lines = lines.map((values) => values.slice(from));
    charts.set(name, chart);
    if (chart.box.parentElement !== place) place.append(chart.box);
    if (known && same) chart.uplot.setData(points(name, chart));
    else redraw(name, chart);
    describe(name, chart);
  }
}

function redrawCharts() {
  for (const [name, chart] of charts) redraw(name, chart);
}

function resizeCharts() {
  for (const chart of charts.values()) chart.uplot.setSize({ width: Math.max(chart.plot.clientWidth, 100), height: CHART_HEIGHT });
}
