"use strict";
/** What report_page.py has packed: text compressed by gzip, as base64; a promise of the text. */
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
/** Let the page count as loaded, and be printed, only after a promise: a frame that is being written delays that. */
function loadAfter(promise) {
  const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
  frame.contentDocument.open();
  promise.finally(() => (frame.contentDocument.close(), frame.remove()));
}
loadAfter((async () => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const { config, curves, charts } = JSON.parse(await unpack(document.getElementById("chart-data").textContent));
  const entries = all(".legend button[data-name]");
  const toggleAll = document.getElementById("toggle-all");
  const rowsOf = (entry) => entry.closest("li").dataset.rows.split(" ").map(Number);
  const rowsOfTable = () => new Set(all("#results-table tbody:not([hidden])").map((body) => Number(body.dataset.row)));
  const state = { hidden: new Set(), brought: null };
  for (const chart of charts) {
    chart.figure = document.getElementById(`chart-${chart.identifier}`);
    all(".panel", chart.figure).forEach((element, index) => {
      const readout = element.querySelector(".readout");
      Object.assign(chart.panels[index], { chart, element, readout, rest: readout.textContent, plot: element.querySelector(".plot") });
    });
  }
  const panels = charts.flatMap((chart) => chart.panels);

  // Specifications: colours are variables of the page's style sheet, data those of a panel.
  function layersOf(panel, layers) {
    const inside = (row) => panel.rows.includes(row.index);
    const data = { curves: curves.filter(inside), ends: panel.chart.ends.filter(inside) };
    return layers.map((layer) => (layer.data.name ? { ...layer, data: { values: data[layer.data.name] } } : layer));
  }
  function shownRows() {
    const rows = rowsOfTable();
    for (const entry of entries) if (state.hidden.has(entry.dataset.name)) rowsOf(entry).forEach((row) => rows.delete(row));
    return [...rows];
  }
  const parameters = () => [{ name: "shown", value: shownRows() }, { name: "brought", value: state.brought }];
  // The expressions of a specification are interpreted: the page allows no code from text.
  const embed = (host, spec) =>
    vegaEmbed(host, { config, ...spec }, { mode: "vega-lite", renderer: "svg", actions: false, ast: true, tooltip: { theme: "page" } });

  async function draw(panel) {
    const { spec } = panel.chart;
    const layer = layersOf(panel, spec.layer);
    const own = { layer, width: "container", description: panel.description, params: parameters() };
    panel.drawn = await embed(panel.plot, { ...spec, ...own });
    const { view } = panel.drawn;
    // What is pointed at is an end point, or the cell around the nearest point of a curve.
    view.addEventListener("pointerover", (_, item) => bringOut((item?.datum?.datum ?? item?.datum)?.name ?? null));
    view.addEventListener("pointerout", () => bringOut(null));
    for (const signal of ["zoom_x", "zoom_y"])
      view.addSignalListener(signal, () => panel.chart.moved === panel && view.runAfter(() => lead(panel)));
  }

  // The panels of a chart move together: the others follow the one that was moved last.
  const drawnOf = (list) => list.filter((panel) => panel.drawn).map((panel) => panel.drawn.view);
  function lead(mover) {
    for (const view of drawnOf(mover.chart.panels.filter((panel) => panel !== mover))) {
      for (const signal of ["zoom_x", "zoom_y"]) view.signal(signal, mover.drawn.view.signal(signal));
      view.runAsync();
    }
  }
  for (const panel of panels)
    for (const kind of ["pointerdown", "wheel"])
      panel.plot.addEventListener(kind, () => (panel.chart.moved = panel), { capture: true, passive: true });

  // What is shown and what is brought out is the same in all charts.
  function bringOut(name) {
    state.brought = name;
    for (const panel of panels) {
      const end = panel.chart.ends.find((each) => each.name === name && panel.rows.includes(each.index));
      panel.readout.textContent = end ? end.words : panel.rest;
    }
    drawnOf(panels).forEach((view) => view.signal("brought", name).runAsync());
  }
  function show() {
    const rows = rowsOfTable();
    for (const entry of entries) {
      entry.setAttribute("aria-pressed", String(!state.hidden.has(entry.dataset.name)));
      entry.closest("li").hidden = !rowsOf(entry).some((row) => rows.has(row));
    }
    toggleAll.textContent = state.hidden.size > 0 ? "Show all" : "Hide all";
    for (const panel of panels) panel.element.hidden = !panel.rows.some((row) => rows.has(row));
    for (const chart of charts) chart.figure.hidden = chart.panels.every((panel) => panel.element.hidden);
    drawnOf(panels).forEach((view) => view.signal("shown", shownRows()).runAsync());
    dispatchEvent(new Event("resize")); // of what was hidden
  }
  document.addEventListener("rows", show);
  for (const entry of entries) {
    const { name } = entry.dataset;
    entry.addEventListener("click", () => {
      if (!state.hidden.delete(name)) state.hidden.add(name);
      show();
    });
    for (const begin of ["pointerenter", "focus"]) entry.addEventListener(begin, () => bringOut(name));
    for (const end of ["pointerleave", "blur"]) entry.addEventListener(end, () => bringOut(null));
  }
  toggleAll.addEventListener("click", () => {
    state.hidden = new Set(state.hidden.size > 0 ? [] : entries.map((entry) => entry.dataset.name));
    show();
  });

  const libraries = document.createElement("script");
  libraries.textContent = await unpack(document.getElementById("libraries").textContent);
  document.head.append(libraries);
  for (const panel of panels) await draw(panel);
  show(); // what was filtered and hidden meanwhile
  document.getElementById("figures").setAttribute("aria-busy", "false");
})());
