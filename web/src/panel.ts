// All that is known of what is selected.

import { course, histogram } from "./charts.ts";
import type { Statistics } from "./data.ts";
import { numberOf } from "./data.ts";
import { clear, h } from "./dom.ts";
import type { Facts } from "./facts.ts";
import { MEASURED, NOT_MEASURED } from "./reading.ts";
import { words } from "./scale.ts";
import type { Series } from "./series.ts";
import type { Item } from "./tree.ts";

export interface Chosen {
  item: Item;
  nodes: number[];
  opens: boolean;
}

export interface Wishes {
  go(node: number): void;
  toggle(): void;
  step(event: number): void;
  finding(place: number): void;
}

const NAMES: Record<string, string> = {
  numel: "entries",
  l2_norm: "l2 norm",
  max_abs: "max abs",
  min_abs_nonzero: "min abs, not 0",
  abs_sum: "sum of moduli",
  nan_count: "NaN",
  inf_count: "Inf",
  zero_count: "exactly 0",
  flush_count: "0 in float16",
  subnormal_count: "subnormal",
  overflow_count: "beyond float16",
};
const MANY = 30;
const SEEN = 0.05; // decades from which a change is one

export class Panel {
  constructor(
    readonly element: HTMLElement,
    private readonly facts: Facts,
    private readonly wishes: Wishes,
    private readonly code: Record<string, Record<string, string>> | null,
    private readonly series: Series | null,
  ) {}

  show(chosen: Chosen | null): void {
    if (chosen === null) clear(this.element, ...this.overview());
    else if (chosen.item.kind === "node") clear(this.element, ...this.node(chosen.nodes));
    else clear(this.element, ...this.group(chosen));
  }

  // ---- the whole flow ------------------------------------------------------------------------------------------

  private overview(): HTMLElement[] {
    const { about, nodes, sites, spots, not_checked } = this.facts.flow.data;
    const measured = this.facts.reading.sites.look.filter((look) => look !== NOT_MEASURED).length;
    const reasons = new Map<string, number>();
    for (const spot of spots) {
      const reason = this.facts.flow.word(spot[2]);
      reasons.set(reason, (reasons.get(reason) ?? 0) + 1);
    }
    const rows: [string, string][] = [
      ["loss", about.loss],
      ["values", `${measured} of ${sites.node.length} measured, ${nodes.key.length} nodes`],
      ["mode", about.training ? "training" : "evaluation"],
      ["backward pass", String(about.backward)],
      ["statistics", `${about.level}, ${about.sites === "edge" ? "each use of a value" : "values"}`],
      ["made by", `fxgrad ${about.fxgrad ?? ""}, torch ${about.torch}, ${about.front_end}`],
    ];
    if (about.loss_scale !== null) rows.push(["loss scale", words(numberOf(about.loss_scale))]);
    if (about.failed !== null) rows.push(["backward raised", about.failed]);
    const found = [...this.changed(), h("h2", {}, "This backward pass"), facts(rows)];
    if (reasons.size > 0) {
      found.push(h("h3", {}, "Without a gradient"));
      found.push(
        facts(
          [...reasons].map(([reason, n]) => [`${n} × ${reason.replaceAll("_", " ")}`, about.reasons[reason] ?? ""]),
        ),
      );
    }
    if (not_checked.length > 0) {
      const list = not_checked.map(([rule, reason, give]) =>
        h("li", {}, `${rule}: ${reason}${give ? ` (give ${give})` : ""}`),
      );
      found.push(
        h("details", {}, h("summary", {}, `${not_checked.length} checks could not run`), h("ul", {}, ...list)),
      );
    }
    found.push(
      h(
        "p",
        { class: "faint" },
        "Select a box to see all that is known of it. Double-click it, or press Enter, to open it.",
      ),
    );
    return found;
  }

  /** In a comparison, the values that changed most. */
  private changed(): HTMLElement[] {
    if (!this.facts.comparing) return [];
    const { node } = this.facts.flow.data.sites;
    const far = [...node.keys()].map((site) => ({ site, far: this.facts.moved(site) })).filter((one) => one.far > SEEN);
    far.sort((a, b) => b.far - a.far);
    const rows = far
      .slice(0, MANY)
      .map(({ site }) =>
        h("tr", {}, h("td", {}, this.link(node[site])), h("td", { class: "number" }, this.facts.told([site]))),
      );
    const same = h("p", { class: "faint" }, `${node.length - far.length} of ${node.length} values as before`);
    return [
      h("h2", {}, `${this.facts.norm} before → after, changed most first`),
      h("table", {}, h("tbody", {}, ...rows)),
      same,
    ];
  }

  // ---- one node ------------------------------------------------------------------------------------------------

  private node(nodes: number[]): (HTMLElement | SVGElement)[] {
    const node = nodes[0];
    const { flow } = this.facts;
    const { key, target, path, constants } = flow.data.nodes;
    const outputs = this.facts.outputs(nodes);
    const gain = this.facts.gain(nodes, outputs);
    const rows: [string, string | HTMLElement][] = [
      ["calls", `${flow.op(node).replace("call_", "")} ${flow.word(target[node])}`],
      ["in module", flow.word(path[node]) || "the model itself"],
      ["gain", gain === null ? "cannot be told" : `${words(gain)} (norm passed back / norm received)`],
    ];
    const given = Object.entries(constants[node] ?? {});
    if (given.length > 0) rows.push(["with", given.map(([name, text]) => `${name}=${text}`).join(", ")]);
    const passing = nodes.slice(1).map((one) => key[one]);
    if (passing.length > 0) rows.push(["passed on as it is", passing.join(", ")]);
    const found: (HTMLElement | SVGElement)[] = [h("h2", {}, key[node]), ...this.guilty(nodes), facts(rows)];
    const source = this.source(node);
    if (source) found.push(source);
    for (const spot of flow.spotsOf.get(node) ?? []) {
      found.push(
        h("p", { class: "blind" }, h("b", {}, `Not measured${spot[1] ? ` at ${spot[1]}` : ""}: `), flow.word(spot[3])),
      );
    }
    for (const site of flow.sitesOf[node]) found.push(...this.site(site));
    found.push(...this.uses(node), ...this.parameters(node));
    return found;
  }

  private source(node: number): HTMLElement | null {
    const place = this.facts.flow.data.nodes.source[node];
    if (place === null) return null;
    const [file, line] = [this.facts.flow.word(place[0]), place[1]];
    const name = h("p", { class: "source" }, h("code", {}, `${file}:${line}`));
    const lines = this.code?.[file];
    if (!lines) return name;
    const near = Object.entries(lines).filter(([n]) => Math.abs(Number(n) - line) <= 5);
    const indents = near.filter(([, text]) => text.trim()).map(([, text]) => text.length - text.trimStart().length);
    const indent = Math.min(...indents, 200);
    const rows = near.map(([n, text]) =>
      h("span", { class: Number(n) === line ? "here" : null }, `${n.padStart(4)}  ${text.slice(indent)}\n`),
    );
    return h(
      "div",
      {},
      name,
      h("pre", { tabindex: 0, "aria-label": `Code around line ${line}` }, h("code", {}, ...rows)),
    );
  }

  private site(site: number): (HTMLElement | SVGElement)[] {
    const { flow } = this.facts;
    const { shape, dtype, device, statistics, value, derived, rewritten, position } = flow.data.sites;
    const about = `${flow.word(shape[site])} ${flow.word(dtype[site])} on ${flow.word(device[site])}`;
    const found: (HTMLElement | SVGElement)[] = [
      h("h3", {}, `Gradient ${flow.word(position[site])}`),
      h("p", { class: "faint" }, about),
    ];
    const row = flow.row(statistics[site]);
    const shown = this.series === null || this.series.full;
    if (!shown) {
      found.push(facts([["l2 norm", this.facts.told([site])]]));
      found.push(h("p", { class: "faint" }, `All statistics are kept of backward ${flow.data.about.backward}:`));
    }
    const before = this.facts.reading.before;
    if (before !== null) found.push(facts([[`${this.facts.norm}, before → after`, this.facts.told([site])]]));
    if (row === null) found.push(h("p", {}, "No gradient was measured."));
    else found.push(table(row, flow.row(value[site])));
    const chart = row === null ? null : histogram(row, flow);
    if (chart) found.push(h("h4", {}, "Entries by exponent"), chart);
    else if (row !== null && row.level !== "histogram")
      found.push(h("p", { class: "faint" }, 'Measure with statistics="histogram" to see the entries by exponent.'));
    if (derived[site] >= 0)
      found.push(h("p", { class: "faint" }, `The same gradient as of ${flow.siteName(derived[site])}.`));
    const rules = rewritten[site];
    if (rules !== null)
      found.push(
        h(
          "p",
          {},
          h("b", {}, "Rewritten "),
          `by ${rules.rules}: ${rules.way}`,
          ...rules.audit.map((line) => h("span", { class: "line" }, line)),
        ),
      );
    if (this.series?.has(site)) {
      const { series } = this;
      const label = `${this.facts.norm} of this gradient over ${series.count} backward passes`;
      found.push(
        h("h4", {}, "Over the run"),
        course({ values: series.logs(site, this.facts.norm), at: series.at, label, pick: this.wishes.step }),
      );
    }
    return found;
  }

  /** Who takes the value, and how much each sends back. */
  private uses(node: number): HTMLElement[] {
    const { flow } = this.facts;
    const { consumer, producer, argument, reason, rewritten } = flow.data.edges;
    const list = (edges: number[], other: number[], words_: string): HTMLElement[] => {
      if (edges.length === 0) return [];
      const rows = edges.slice(0, MANY).map((edge) => {
        const { look, value } = this.facts.flowing([edge]);
        const why = reason[edge] >= 0 ? flow.word(reason[edge]).replaceAll("_", " ") : "";
        const told =
          look === MEASURED
            ? words(value)
            : look === NOT_MEASURED
              ? why || "–"
              : ["", "0", "NaN or Inf", "outside float32"][look];
        const rule = rewritten[edge] ? ` rewritten by ${rewritten[edge].rules}` : "";
        return h(
          "tr",
          {},
          h("td", {}, this.link(other[edge])),
          h("td", { class: "faint" }, flow.word(argument[edge])),
          h("td", { class: "number" }, told + rule),
        );
      });
      const more = edges.length > MANY ? [h("p", { class: "faint" }, `and ${edges.length - MANY} more`)] : [];
      return [h("h3", {}, words_), h("table", {}, h("tbody", {}, ...rows)), ...more];
    };
    return [
      ...list(flow.outOf[node], consumer, "Sent back by its users"),
      ...list(flow.into[node], producer, "Passed back to its inputs"),
    ];
  }

  private parameters(node: number): HTMLElement[] {
    const { flow } = this.facts;
    const { name, shape, statistics, value, reason } = flow.data.parameters;
    const own = flow.data.nodes.parameters[node] ?? [];
    if (own.length === 0) return [];
    const rows = own.map((one) => {
      const gradient = flow.row(statistics[one]);
      const weight = flow.row(value[one]);
      const told = gradient === null ? flow.word(reason[one]).replaceAll("_", " ") || "–" : words(this.norm(gradient));
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, name[one]),
        h("td", { class: "faint" }, flow.word(shape[one])),
        h("td", { class: "number" }, told),
        h("td", { class: "number" }, weight ? words(this.norm(weight)) : ""),
      );
    });
    const head = h("tr", {}, ...["name", "shape", "gradient", "itself"].map((word) => h("th", { scope: "col" }, word)));
    return [
      h("h3", {}, `Parameters, ${this.facts.norm}`),
      h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)),
    ];
  }

  private norm(row: Statistics): number | null {
    if (this.facts.norm === "max_abs") return row.maxAbs;
    return this.facts.norm === "rms" ? row.l2 / Math.sqrt(row.numel || 1) : row.l2;
  }

  // ---- a module, a run or a part ---------------------------------------------------------------------------------

  private group({ item, nodes, opens }: Chosen): HTMLElement[] {
    const outputs = this.facts.outputs(nodes);
    const gain = this.facts.gain(nodes, outputs);
    const inside = this.facts.inside(nodes);
    const rows: [string, string | HTMLElement][] = [
      ["receives", this.facts.told(outputs)],
      ["gain", gain === null ? "cannot be told" : `${words(gain)} (norm passed back / norm received)`],
    ];
    if (inside !== null) {
      for (const [name, site] of [
        ["worst", inside.worst],
        ["middle", inside.middle],
        ["last", inside.last],
      ] as const) {
        const line = h("span", {}, `${this.facts.told([site])} at `, this.link(this.facts.flow.data.sites.node[site]));
        rows.push([name, line]);
      }
    }
    const button = h("button", { type: "button", click: () => this.wishes.toggle() }, opens ? "Open" : "Close");
    const worst = this.facts.measured(nodes).map((site) => ({ site, far: this.facts.far(site) }));
    worst.sort((a, b) => b.far - a.far);
    const list = worst.slice(0, 12).map(({ site }) => {
      const node = this.facts.flow.data.sites.node[site];
      return h("tr", {}, h("td", {}, this.link(node)), h("td", { class: "number" }, this.facts.told([site])));
    });
    return [
      h("h2", {}, item.name),
      h("p", { class: "faint" }, `${item.type} · ${nodes.length} nodes`),
      button,
      ...this.guilty(nodes),
      facts(rows),
      h("h3", {}, this.facts.comparing ? "Changed most" : "Farthest from the loss side"),
      h("table", {}, h("tbody", {}, ...list)),
    ];
  }

  private guilty(nodes: number[]): HTMLElement[] {
    return this.facts.guilty(nodes).map((place) => {
      const finding = this.facts.findings[place];
      return h(
        "button",
        { type: "button", class: `finding-link ${finding.severity}`, click: () => this.wishes.finding(place) },
        `${place + 1}. ${finding.severity} ${finding.rule}`,
      );
    });
  }

  private link(node: number): HTMLElement {
    const name = this.facts.flow.data.nodes.key[node];
    return h("button", { type: "button", class: "link", click: () => this.wishes.go(node) }, name);
  }
}

function facts(rows: [string, string | HTMLElement][]): HTMLElement {
  return h("dl", {}, ...rows.flatMap(([name, told]) => [h("dt", {}, name), h("dd", {}, told)]));
}

/** All statistics of a gradient, and beside them those of the value where they were taken. */
function table(gradient: Statistics, value: Statistics | null): HTMLElement {
  const rms = (row: Statistics | null): [string, number][] =>
    row ? [["rms", row.l2 / Math.sqrt(row.numel || 1)], ...row.all] : [];
  const other = new Map(rms(value));
  const rows = rms(gradient).map(([name, number]) => {
    const cells = [h("td", { class: "number" }, shown(name, number))];
    if (value !== null) cells.push(h("td", { class: "number" }, other.has(name) ? shown(name, other.get(name)!) : ""));
    return h("tr", {}, h("th", { scope: "row" }, NAMES[name] ?? name.replaceAll("_", " ")), ...cells);
  });
  const heads = ["", "gradient", ...(value === null ? [] : ["value, forward"])].map((word) =>
    word ? h("th", { scope: "col" }, word) : h("td"),
  );
  return h("table", { class: "statistics" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows));
}

function shown(name: string, number: number): string {
  return name.endsWith("_count") || name === "numel" ? number.toLocaleString("en") : words(number, 4);
}
