// Runs before the page is shown: Airflow's theme, which its UI stores in this browser, and whether this is an iframe.
"use strict";

function applyTheme() {
  let theme = null;
  try { theme = localStorage.getItem("theme"); } catch { /* the sandbox may forbid it */ }
  const dark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

applyTheme();
document.documentElement.classList.toggle("framed", window.top !== window);
