// Filters the table of trainings. The Content-Security-Policy allows no form to be sent, so the script makes the address.
"use strict";

document.getElementById("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = [...new FormData(event.target)].filter(([, value]) => value);
  location.search = new URLSearchParams(given).toString();
});
