// Filters the table of trainings, and compares those that are ticked. The Content-Security-Policy allows no form to be sent, so the script makes the address.
"use strict";

document.getElementById("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = [...new FormData(event.target)].filter(([, value]) => value);
  location.search = new URLSearchParams(given).toString();
});

const FEWEST = 2, MOST = 10; // trainings of a comparison
const compare = document.getElementById("compare"), picked = new Set();

function showPicked() {
  for (const box of content.querySelectorAll(".pick")) box.checked = picked.has(box.value);
  compare.disabled = picked.size < FEWEST || picked.size > MOST;
  compare.textContent = compare.disabled ? `Compare: tick ${FEWEST} to ${MOST} trainings` : `Compare ${picked.size} trainings`;
}

content.addEventListener("change", ({ target }) => {
  if (!target.classList.contains("pick")) return;
  if (target.checked) picked.add(target.value);
  else picked.delete(target.value);
  showPicked();
});
compare.addEventListener("click", () => {
  location.href = `compare?${new URLSearchParams([...picked].map((key) => ["training", key]))}`;
});
document.addEventListener("laidout", showPicked); // rows were replaced
showPicked();
