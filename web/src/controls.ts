// What one works the page with: search, filter, norms, tools, the legend, the list of findings, the keyboard.

import type { App } from "./app.ts";
import { clear, h } from "./dom.ts";
import { pngOf, save, svgText } from "./saving.ts";
import { power, words } from "./scale.ts";
import { walk } from "./tree.ts";

export function controls(app: App): void {
  norms(app);
  tools(app);
  search(app);
  findings(app);
  legend(app);
  keyboard(app);
  const { filter } = app.parts;
  filter.addEventListener("change", () => app.setFilter(filter.value));
  app.on(() => {
    filter.value = app.filter;
  });
}

// ---- norms and tools ----------------------------------------------------------------------------------------------

function norms(app: App): void {
  const names = { l2_norm: "l2", rms: "rms", max_abs: "max abs" };
  const buttons = app.norms.map((norm) => {
    const button = h("button", { type: "button", click: () => app.setNorm(norm) }, names[norm]);
    app.on(() => button.setAttribute("aria-pressed", String(app.facts.norm === norm)));
    return button;
  });
  clear(app.parts.norms, ...buttons);
}

function tools(app: App): void {
  const button = (label: string, title: string, click: () => void): HTMLElement =>
    h("button", { type: "button", title, "aria-label": /\w/.test(label) ? null : title, click }, label);
  const name = app.flow.data.about.model.replace(/[^\w.-]+/g, "_") || "model";
  clear(
    app.parts.tools,
    button("Open all", "Open all modules", () => app.openAll()),
    button("Close all", "Close all modules", () => app.closeAll()),
    button("Fit", "Fit the graph into the window (f)", () => app.view.fit(app.scene)),
    button("Reset", "As it was at first", () => app.reset()),
    button("SVG", "Save the view as SVG", () =>
      save(new Blob([svgText(app.parts.svg)], { type: "image/svg+xml" }), `${name}.svg`),
    ),
    button("PNG", "Save the view as PNG", () => {
      pngOf(app.parts.svg).then(
        (blob) => save(blob, `${name}.png`),
        (error: Error) => app.say(`No PNG could be made: ${error.message}`),
      );
    }),
    button("◐", "Light, dark, or as the system is set", () => turn(app)),
  );
}

function turn(app: App): void {
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % order.length];
  root.dataset.theme = next;
  app.say(`Theme: ${next}`);
  app.repaint();
}

// ---- search -------------------------------------------------------------------------------------------------------

function search(app: App): void {
  const { search: input, results } = app.parts;
  let found: number[] = [];
  let at = -1;
  const close = (): void => {
    results.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const pick = (place: number): void => {
    close();
    if (found[place] !== undefined) app.go(found[place]);
  };
  const mark = (): void => {
    [...results.children].forEach((entry, n) => {
      entry.setAttribute("aria-selected", String(n === at));
      if (n === at) entry.scrollIntoView({ block: "nearest" });
    });
    if (at >= 0) input.setAttribute("aria-activedescendant", `result-${at}`);
  };
  input.addEventListener("input", () => {
    found = app.search.find(input.value);
    at = found.length > 0 ? 0 : -1;
    const entries = found.map((node, n) =>
      h(
        "li",
        {
          role: "option",
          id: `result-${n}`,
          "aria-selected": "false",
          mousedown: (event: Event) => event.preventDefault(),
          click: () => pick(n),
        },
        h("span", {}, app.flow.data.nodes.key[node]),
        h("span", { class: "faint" }, ` ${app.flow.kind(node)} · ${app.facts.told(app.flow.sitesOf[node])}`),
      ),
    );
    clear(results, ...entries);
    results.hidden = found.length === 0;
    input.setAttribute("aria-expanded", String(found.length > 0));
    app.say(input.value ? `${found.length} found` : "");
    mark();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      at = Math.min(found.length - 1, Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1)));
      mark();
    } else if (event.key === "Enter") pick(at);
    else if (event.key === "Escape") {
      close();
      input.blur();
    }
  });
  input.addEventListener("blur", close);
}

// ---- findings -----------------------------------------------------------------------------------------------------

function findings(app: App): void {
  const list = h("ol");
  const fresh = new Set(app.payload.before?.new ?? []);
  app.findings.forEach((finding, place) => {
    const more = h("div", { class: "more", hidden: true }, ...details(app, place));
    const where = finding.source ? h("span", { class: "faint" }, finding.source) : null;
    const button = h(
      "button",
      {
        type: "button",
        "aria-expanded": "false",
        click: () => (app.finding === place ? app.clearFinding() : app.show(place)),
      },
      h("span", { class: `mark ${finding.severity}` }, String(place + 1)),
      h("b", {}, `${fresh.has(place) ? "new: " : ""}${finding.severity} ${finding.rule} `),
      h("span", {}, finding.at),
      where,
    );
    app.on(() => {
      more.hidden = app.finding !== place;
      button.setAttribute("aria-expanded", String(app.finding === place));
    });
    list.append(h("li", { class: finding.severity }, button, more));
  });
  const verdict = app.payload.verdict ?? app.flow.data.about.verdict;
  clear(
    app.parts.findings,
    h("h2", { class: "verdict" }, verdict[0].toUpperCase() + verdict.slice(1)),
    list,
    ...gone(app),
  );
}

/** What the flow before had, and this one has not. */
function gone(app: App): HTMLElement[] {
  const { before } = app.payload;
  if (!before) return [];
  const lists: [string, string[]][] = [
    ["findings gone", before.gone],
    ["values only before", before.removed],
    ["values only after", before.added],
  ];
  return lists.filter(([, list]) => list.length > 0).map(([words_, list]) => listed(`${list.length} ${words_}`, list));
}

function details(app: App, place: number): HTMLElement[] {
  const { message, suggestion, evidence, confidence, affected, explains, units } = app.findings[place];
  const found: HTMLElement[] = [h("p", {}, message)];
  if (suggestion) found.push(h("p", {}, h("b", {}, "Try: "), suggestion));
  const numbers = Object.entries(evidence).map(
    ([name, value]) => `${name} ${typeof value === "number" ? words(value) : value}`,
  );
  if (numbers.length > 0) found.push(h("p", { class: "faint" }, `Measured (${confidence}): ${numbers.join(", ")}`));
  if (units.length > 0) found.push(h("p", { class: "faint" }, `Units: ${units.join(", ")}`));
  if (affected.length > 0) found.push(listed(`${affected.length} parameters affected`, affected));
  if (explains.length > 0) found.push(listed(`Explains ${explains.length} more`, explains));
  return found;
}

function listed(head: string, entries: string[]): HTMLElement {
  return h("details", {}, h("summary", {}, head), h("ul", {}, ...entries.map((entry) => h("li", {}, entry))));
}

// ---- legend -------------------------------------------------------------------------------------------------------

function legend(app: App): void {
  const { palette } = app.payload;
  const swatches = palette.colours.map((colour, n) => {
    const box = h("span", { class: "swatch", title: `${power(n - palette.decades)}` });
    box.style.backgroundColor = colour;
    return box;
  });
  const head = h("p");
  const [low, high] = app.facts.comparing ? ["smaller", "larger"] : ["vanishing", "exploding"];
  const ends = h(
    "p",
    { class: "ends" },
    h("span", {}, `◂ ${low} ${power(-palette.decades)}`),
    h("span", {}, "1"),
    h("span", {}, `${power(palette.decades)} ${high} ▸`),
  );
  const looks = h(
    "p",
    { class: "looks" },
    ...["zero", "nonfinite", "outside", "blind"].flatMap((look, n) => [
      h("span", { class: `look ${look}` }),
      ["exactly 0", "NaN or Inf", "outside float32", "not measured"][n],
    ]),
  );
  const scale = h("div", { class: "scale" }, h("div", { class: "swatches", "aria-hidden": "true" }, ...swatches), ends);
  clear(app.parts.legend, head, scale, looks);
  app.on(() => {
    const { norm, reference, comparing } = app.facts;
    const name = norm.replace("_", " ");
    const against = app.facts.relative ? `, against ${words(reference)} at the loss side` : "";
    head.textContent = comparing ? `${name}, after against before` : `${name} of the gradient${against}`;
    app.parts.profile.setAttribute("aria-label", app.profile.spoken);
  });
}

// ---- keyboard -----------------------------------------------------------------------------------------------------

function keyboard(app: App): void {
  const { svg } = app.parts;
  const focus = (id: string): void => {
    const drawn = app.graph.drawn.get(id);
    for (const other of app.graph.drawn.values()) other.group.setAttribute("tabindex", other === drawn ? "0" : "-1");
    drawn?.group.focus({ preventScroll: true });
    if (drawn) app.view.show(drawn.place);
  };
  const current = (): string | null => (document.activeElement as HTMLElement | null)?.getAttribute("data-id") ?? null;
  app.on((change) => {
    if (change === "paint") return;
    const ids = [...app.graph.drawn.keys()];
    const at = app.selected && app.graph.drawn.has(app.selected.id) ? app.selected.id : ids[0];
    for (const [id, drawn] of app.graph.drawn) drawn.group.setAttribute("tabindex", id === at ? "0" : "-1");
  });
  svg.addEventListener("keydown", (event) => {
    const id = current();
    const order: string[] = [];
    walk(app.root, (seen) => order.push(seen.id));
    const seen = id === null ? null : app.find(id);
    if (seen === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = order.indexOf(seen.id);
    const moves: Record<string, () => void> = {
      ArrowDown: () => focus(order[Math.min(order.length - 1, at + 1)]),
      ArrowUp: () => focus(order[Math.max(0, at - 1)]),
      Home: () => focus(order[0]),
      End: () => focus(order[order.length - 1]),
      ArrowRight: () =>
        seen.kind === "box" || seen.kind === "strip" ? turnOver() : focus(order[Math.min(order.length - 1, at + 1)]),
      ArrowLeft: () => (seen.kind === "frame" ? turnOver() : outwards()),
      Enter: () => (seen.kind === "node" ? app.select(seen) : turnOver()),
      " ": () => app.select(seen),
      Escape: () => app.select(null),
    };
    const turnOver = (): void => {
      app.toggle(seen);
      if (app.selected) focus(app.selected.id);
    };
    const outwards = (): void => {
      let up = seen.item.parent;
      while (up !== null && !app.graph.drawn.has(up.id)) up = up.parent;
      if (up !== null) focus(up.id);
      else if (seen.item.parent?.kind === "run" && app.open.has(seen.item.id)) turnOver();
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test((event.target as HTMLElement).tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      app.parts.search.focus();
    } else if (event.key === "f") app.view.fit(app.scene);
    else if (event.key === "+") app.view.by(1.25);
    else if (event.key === "-") app.view.by(0.8);
  });
}
