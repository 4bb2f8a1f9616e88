"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const table = document.getElementById("results-table");
  const bodies = all("tbody", table);

  // Sorting: rows without a value come last in both directions; equal ones keep the order of the document.
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  function sort(header) {
    const descending = header.getAttribute("aria-sort") === "ascending";
    const isNumber = header.querySelector("button").dataset.sort === "number";
    const sign = descending ? -1 : 1;
    const key = (body) => body.rows[0].cells[header.cellIndex].dataset.value;
    const compare = (one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (isNumber ? Number(a) - Number(b) : collator.compare(a, b));
    };
    all("th[aria-sort]", table).forEach((other) => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    table.append(...[...bodies].sort(compare));
  }
  all("thead button", table).forEach((button) => button.addEventListener("click", () => sort(button.closest("th"))));

  // Columns: a row of commands has none of them.
  for (const box of all("[data-column]"))
    box.addEventListener("change", () => {
      for (const row of table.rows) (row.cells[box.dataset.column] ?? {}).hidden = !box.checked;
    });

  // Filtering: the charts and their legend follow the table; see charts.js.
  const form = document.getElementById("filters");
  const count = document.getElementById("count");
  function filter() {
    const words = document.getElementById("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = all("select", form).filter((select) => select.value !== "");
    let shown = 0;
    for (const body of bodies) {
      const fits =
        words.every((word) => body.dataset.text.includes(word)) &&
        chosen.every((select) => body.getAttribute(`data-${select.dataset.setting}`) === select.value);
      body.hidden = !fits;
      shown += fits;
    }
    const total = Number(count.dataset.total);
    const rows = total === 1 ? "row" : "rows";
    count.textContent = shown === total ? `${total} ${rows}` : `${shown} of ${total} ${rows}`;
    document.getElementById("no-rows").hidden = shown > 0;
    document.dispatchEvent(new Event("rows"));
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));

  // Commands.
  for (const toggle of all(".toggle", table)) {
    toggle.addEventListener("click", () => {
      const details = document.getElementById(toggle.getAttribute("aria-controls"));
      details.hidden = !details.hidden;
      toggle.setAttribute("aria-expanded", String(!details.hidden));
    });
  }
})();
