"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const table = document.getElementById("results-table");
  if (!table) return;
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

  // Filtering: the charts and their legend follow the table.
  const form = document.getElementById("filters");
  const count = document.getElementById("count");
  function filter() {
    const words = document.getElementById("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = all("select", form).filter((select) => select.value !== "");
    const shown = new Set();
    for (const body of bodies) {
      const fits =
        words.every((word) => body.dataset.text.includes(word)) &&
        chosen.every((select) => body.getAttribute(`data-${select.dataset.setting}`) === select.value);
      body.hidden = !fits;
      if (fits) shown.add(body.dataset.row);
    }
    all(".series").forEach((series) => series.toggleAttribute("hidden", !shown.has(series.dataset.row)));
    all(".panel").forEach((panel) => (panel.hidden = !panel.querySelector(".series:not([hidden])")));
    all(".figure").forEach((figure) => (figure.hidden = !figure.querySelector(".panel:not([hidden])")));
    all(".legend li").forEach((item) => (item.hidden = !item.dataset.rows.split(" ").some((row) => shown.has(row))));
    all(".plot").forEach(makeReachable);
    const total = Number(count.dataset.total);
    const rows = total === 1 ? "row" : "rows";
    count.textContent = shown.size === total ? `${total} ${rows}` : `${shown.size} of ${total} ${rows}`;
    document.getElementById("no-rows").hidden = shown.size > 0;
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
  for (const button of all(".copy", table)) {
    button.addEventListener("click", async () => {
      const commands = button.parentElement.querySelector("pre");
      getSelection().selectAllChildren(commands);
      let copied = false;
      try {
        await navigator.clipboard.writeText(all("code", commands).map((code) => code.textContent).join("\n"));
        copied = true;
      } catch {
        copied = document.execCommand("copy");
      }
      const said = button.parentElement.querySelector(".copied");
      said.textContent = copied ? "Copied." : "Selected: copy it with Ctrl+C.";
    });
  }

  // Charts: what is under the pointer, or has the focus, is brought out everywhere and said below its panel.
  let pinned = null;
  function bringOut(name) {
    for (const series of all(".series")) {
      series.classList.toggle("muted", name !== null && series.dataset.name !== name);
      series.classList.toggle("out", series.dataset.name === name);
    }
  }
  for (const series of all(".series")) {
    const readout = series.closest(".panel").querySelector(".readout");
    const rest = readout.textContent;
    const enter = () => {
      bringOut(series.dataset.name);
      readout.textContent = series.getAttribute("aria-label");
    };
    const leave = () => {
      bringOut(pinned);
      readout.textContent = rest;
    };
    series.addEventListener("pointerenter", enter);
    series.addEventListener("pointerleave", leave);
    series.addEventListener("focus", enter);
    series.addEventListener("blur", leave);
  }
  for (const button of all(".legend button")) {
    const name = button.dataset.name;
    button.addEventListener("click", () => {
      pinned = pinned === name ? null : name;
      all(".legend button").forEach((other) => other.setAttribute("aria-pressed", String(other.dataset.name === pinned)));
      bringOut(pinned);
    });
    button.addEventListener("pointerenter", () => bringOut(name));
    button.addEventListener("pointerleave", () => bringOut(pinned));
    button.addEventListener("focus", () => bringOut(name));
    button.addEventListener("blur", () => bringOut(pinned));
  }
  // One stop of the Tab key for each chart; arrow keys go on from there.
  function makeReachable(plot) {
    const shown = all(".series:not([hidden])", plot);
    all(".series", plot).forEach((series) => series.setAttribute("tabindex", series === shown[0] ? "0" : "-1"));
  }
  for (const plot of all(".plot")) {
    makeReachable(plot);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const shown = all(".series:not([hidden])", plot);
      const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
      event.preventDefault();
      all(".series", plot).forEach((series) => series.setAttribute("tabindex", series === next ? "0" : "-1"));
      next.focus();
    });
  }
})();
