// The parts of the page, empty.

import type { FlowData } from "./data.ts";
import { h, s } from "./dom.ts";
import { FILTERS } from "./lookup.ts";

export interface Parts {
  search: HTMLInputElement;
  results: HTMLElement;
  filter: HTMLSelectElement;
  norms: HTMLElement;
  tools: HTMLElement;
  svg: SVGSVGElement;
  layer: SVGGElement;
  legend: HTMLElement;
  profile: HTMLCanvasElement;
  tip: HTMLElement;
  findings: HTMLElement;
  panel: HTMLElement;
  time: HTMLElement;
  status: HTMLElement;
  empty: HTMLElement;
}

export function skeleton(app: HTMLElement, data: FlowData, title: string): Parts {
  const { model } = data.about;
  const search = h("input", {
    type: "search",
    id: "search",
    placeholder: "Search name, path, op, file  ( / )",
    "aria-label": "Search by name, module path, operation or file",
    role: "combobox",
    "aria-expanded": "false",
    "aria-controls": "results",
    "aria-autocomplete": "list",
    autocomplete: "off",
    spellcheck: "false",
  });
  const results = h("ul", { id: "results", role: "listbox", "aria-label": "Found", hidden: true });
  const options = FILTERS.map(([value, words]) => h("option", { value }, value ? words : "Show: everything"));
  const filter = h("select", { "aria-label": "Show only" }, ...options);
  const norms = h("div", { class: "switch", role: "group", "aria-label": "Norm" });
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "View" });
  const layer = s("g");
  const svg = s(
    "svg",
    { id: "graph", role: "tree", "aria-label": `Graph of ${model}: forward runs down, the gradient runs up` },
    s(
      "defs",
      {},
      s(
        "marker",
        {
          id: "tip",
          viewBox: "0 0 8 8",
          refX: 7,
          refY: 4,
          markerWidth: 7,
          markerHeight: 7,
          markerUnits: "userSpaceOnUse",
          orient: "auto",
        },
        s("path", { d: "M0 0L8 4L0 8z", class: "tip" }),
      ),
      s(
        "pattern",
        { id: "stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("rect", { width: 1.6, height: 7, fill: "#ffffff", "fill-opacity": 0.34 }),
      ),
    ),
    layer,
  );
  const legend = h("div", { class: "legend" });
  const profile = h("canvas", { role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  const findings = h("section", { class: "findings", "aria-label": "Findings" });
  const panel = h("section", { class: "panel", "aria-label": "Details" });
  const time = h("footer", { class: "time", hidden: true, "aria-label": "Time" });
  const status = h("p", { class: "spoken", role: "status" });
  const empty = h("p", { class: "empty", hidden: true }, "No node was recorded.");
  app.replaceChildren(
    h(
      "header",
      {},
      h("h1", {}, title),
      h("span", { class: "space" }),
      h("div", { class: "find" }, search, results),
      filter,
      norms,
      tools,
    ),
    h(
      "main",
      {},
      h("div", { class: "stage" }, svg, legend, empty),
      h(
        "div",
        { class: "profile" },
        h("p", { class: "head", "aria-hidden": "true" }, "norm against depth"),
        profile,
        tip,
      ),
      h("aside", { tabindex: 0, "aria-label": "Findings and details" }, findings, panel),
    ),
    time,
    status,
  );
  return {
    search,
    results,
    filter,
    norms,
    tools,
    svg,
    layer,
    legend,
    profile,
    tip,
    findings,
    panel,
    time,
    status,
    empty,
  };
}
