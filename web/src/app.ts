// The page: what is open, what is selected, which norm and step are shown, and all that follows from that.

import { type Address, read, write } from "./address.ts";
import type { Finding, Flow, Norm, Payload } from "./data.ts";
import { Facts } from "./facts.ts";
import { Graph } from "./graph.ts";
import { arrange, type Scene, type Sizes } from "./layout.ts";
import { FILTERS, filterOf, pairsOf, Search, wayBack } from "./lookup.ts";
import { openAll, opening, partition } from "./opening.ts";
import { Panel } from "./panel.ts";
import { Profile } from "./profile.ts";
import type { Reading } from "./reading.ts";
import type { Series } from "./series.ts";
import type { Parts } from "./skeleton.ts";
import { type Item, type Seen, Tree, walk } from "./tree.ts";
import { View } from "./view.ts";

const LEAST = 420; // height of a column, in a window that is very low

export type Change = "layout" | "paint" | "select" | "finding";

export class App {
  readonly tree: Tree;
  readonly facts: Facts;
  readonly search: Search;
  readonly graph: Graph;
  readonly view: View;
  readonly profile: Profile;
  readonly panel: Panel;
  open = new Set<string>();
  scene: Scene = { places: new Map(), lines: [], width: 0, height: 0 };
  root: Seen;
  filter = "";
  finding: number | null = null;
  private chosen: Seen | null = null;
  private first: string[] = [];
  private timer = 0;
  private readonly listeners: ((change: Change) => void)[] = [];
  private readonly sizes: Sizes;

  constructor(
    readonly payload: Payload,
    readonly flow: Flow,
    readonly parts: Parts,
    reading: Reading,
    readonly series: Series | null,
  ) {
    this.tree = new Tree(flow);
    this.facts = new Facts(flow, reading, payload.palette, flow.data.findings);
    this.facts.norm = payload.norm;
    this.facts.relative = payload.scale === "relative";
    this.facts.renew();
    this.search = new Search(flow);
    this.root = this.tree.seen(this.open);
    this.graph = new Graph(parts.layer, this.facts, {
      select: (seen) => this.select(seen),
      toggle: (seen) => this.toggle(seen),
      open: (item) => this.reveal(item),
      hover: (seen) => this.profile.mark(seen?.nodes ?? [], false),
    });
    this.view = new View(parts.svg, parts.layer, () => this.remember());
    this.profile = new Profile(parts.profile, parts.tip, this.facts, {
      pick: (node) => this.go(node),
      hover: (node) => this.graph.hovered(node === null ? null : (this.seenOf(node)?.id ?? null)),
    });
    this.panel = new Panel(
      parts.panel,
      this.facts,
      {
        go: (node) => this.go(node),
        toggle: () => this.chosen && this.toggle(this.chosen),
        step: (event) => this.step(event),
        finding: (place) => this.show(place),
      },
      payload.code,
      series,
    );
    this.sizes = {
      of: (seen) => this.graph.card(seen),
      column: 0,
      breaks: new Map(),
      known: new Map(),
    };
  }

  resize(): void {
    this.view.resize();
    this.profile.resize();
    if (this.scene.width === 0 || this.view.touched) return;
    // Nobody has moved anything yet, so that it may open again as is best in this window.
    const unchanged = [...this.open].sort().join() === [...this.first].sort().join();
    if (unchanged) {
      this.open = this.best();
      this.draw();
    }
    this.view.fit(this.scene);
  }

  /** What is best open at first, in the window as it is now. */
  private best(): Set<string> {
    this.forget();
    const sizes = (): Sizes => ({ ...this.sizes, breaks: new Map(), known: new Map() });
    partition(this.tree, this.flow, sizes, this.view.room);
    this.first = [...opening(this.tree, this.flow, sizes, this.view.room)];
    return new Set(this.first);
  }

  on(listener: (change: Change) => void): void {
    this.listeners.push(listener);
  }

  private tell(change: Change): void {
    for (const listener of this.listeners) listener(change);
    this.remember();
  }

  /** As the address says, or as it is best at first. */
  start(): void {
    const address = read(location.hash);
    this.resize();
    this.open = this.best();
    if (address.open !== null) this.open = new Set(address.open);
    if (address.step !== null) this.step(address.step);
    if (address.norm !== null && this.norms.includes(address.norm)) this.setNorm(address.norm);
    this.draw();
    this.view.fit(this.scene);
    this.profile.renew();
    if (address.filter !== null && FILTERS.some(([name]) => name === address.filter)) this.setFilter(address.filter);
    if (address.finding !== null && address.finding < this.findings.length) this.show(address.finding);
    const at = address.at === null ? undefined : this.tree.byId.get(address.at);
    if (at) this.selectItem(at);
    else if (address.finding === null) this.select(null);
    if (address.view !== null) {
      this.view.to(...address.view);
      this.view.touched = true;
    }
  }

  get findings(): readonly Finding[] {
    return this.flow.data.findings;
  }

  get norms(): Norm[] {
    return this.flow.data.about.level === "norm" ? ["l2_norm", "rms"] : ["l2_norm", "rms", "max_abs"];
  }

  get selected(): Seen | null {
    return this.chosen;
  }

  // ---- layout --------------------------------------------------------------------------------------------------

  draw(): void {
    this.root = this.tree.seen(this.open);
    this.scene = arrange(this.root, this.flow, this.sizes);
    this.graph.draw(this.root, this.scene);
    this.graph.dim(filterOf(this.filter, this.facts));
    this.drawWay();
    this.tell("layout");
  }

  /** Opens or closes something, and keeps it where it is seen. */
  toggle(seen: Seen): void {
    if (seen.kind === "strip") {
      for (const block of seen.blocks) this.open.add(block.id);
    } else if (seen.kind === "box") {
      this.openItem(seen.item);
    } else if (seen.kind === "frame" || seen.item.parent?.kind === "run") {
      this.open.delete(seen.item.id);
    } else {
      return;
    }
    this.redraw(seen);
    const next = this.find(seen.item.id) ?? this.seenOf(seen.nodes[0]);
    if (next) this.select(next);
  }

  private redraw(kept: Seen | null): void {
    const node = kept?.nodes[0] ?? 0;
    const before = kept ? (this.scene.places.get(kept.id) ?? null) : null;
    this.draw();
    const same = kept ? (this.scene.places.get(kept.id) ?? this.scene.places.get(this.seenOf(node)?.id ?? "")) : null;
    this.view.keep(before, same ?? null);
  }

  /** Opens an item, and further what is alone in it. */
  private openItem(item: Item): void {
    this.open.add(item.id);
    const [only] = item.children;
    if (item.children.length === 1 && (only.kind === "module" || only.kind === "part")) this.openItem(only);
  }

  /** Opens all that hides an item, then the item itself. */
  reveal(item: Item): void {
    const seen = this.seenOf(item.nodes[0]);
    for (const above of this.tree.above(item)) this.open.add(above.id);
    if (item.parent?.kind === "run") this.open.add(item.id);
    if (item.kind !== "node") this.openItem(item);
    this.redraw(seen);
    this.selectItem(item);
  }

  openAll(): void {
    this.open = openAll(this.tree);
    this.redraw(this.chosen);
  }

  closeAll(): void {
    this.open = new Set();
    this.forget();
    this.draw();
    this.view.fit(this.scene);
  }

  /** Breaks columns anew, as the window is now. */
  private forget(): void {
    this.sizes.column = Math.max(LEAST, this.view.room.height);
    this.sizes.breaks.clear();
    this.sizes.known.clear();
  }

  reset(): void {
    this.open = new Set(this.first);
    this.forget();
    this.finding = null;
    this.draw();
    this.view.fit(this.scene);
    this.select(null);
  }

  // ---- selection -----------------------------------------------------------------------------------------------

  find(id: string): Seen | null {
    let found: Seen | null = null;
    walk(this.root, (seen) => {
      if (seen.id === id) found = seen;
    });
    return found;
  }

  /** The smallest thing that is seen of a node. */
  seenOf(node: number): Seen | null {
    let found: Seen | null = null;
    walk(this.root, (seen) => {
      if (seen.kind !== "frame" && seen.nodes.includes(node)) found = seen;
    });
    return found;
  }

  select(seen: Seen | null): void {
    this.chosen = seen;
    this.graph.mark(seen?.id ?? null);
    this.profile.mark(seen?.nodes ?? [], true);
    this.showPanel();
    this.tell("select");
  }

  private showPanel(): void {
    const seen = this.chosen;
    this.panel.show(seen && { item: seen.item, nodes: seen.nodes, opens: seen.kind !== "frame" });
  }

  showItem(item: Item): void {
    const hidden = this.find(item.id) === null;
    const kept = this.seenOf(item.nodes[0]);
    for (const above of this.tree.above(item)) this.open.add(above.id);
    if (item.parent?.kind === "run") this.open.add(item.id);
    if (hidden) this.redraw(kept);
    this.selectItem(item);
  }

  private selectItem(item: Item): void {
    const seen = this.find(item.id) ?? this.seenOf(item.nodes[0]);
    if (seen === null) return;
    this.select(seen);
    const place = this.scene.places.get(seen.id);
    if (place) this.view.show(place);
  }

  /** Opens what hides a node, and selects it. */
  go(node: number): void {
    const item = this.tree.leaf[node];
    const hidden = this.seenOf(node)?.item !== item;
    for (const above of this.tree.above(item)) this.open.add(above.id);
    if (hidden) this.redraw(this.seenOf(node));
    this.selectItem(item);
  }

  // ---- findings ------------------------------------------------------------------------------------------------

  /** Opens what hides the culprit of a finding, and draws its way back from the loss. */
  show(place: number): void {
    this.finding = place;
    const finding = this.findings[place];
    if (this.series !== null && finding.backward !== null) {
      const event = this.series.data.backward.indexOf(finding.backward);
      if (event >= 0) this.step(event);
    }
    const [culprit] = finding.nodes;
    if (culprit !== undefined) this.go(culprit);
    this.drawWay();
    this.tell("finding");
  }

  private drawWay(): void {
    const finding = this.finding === null ? null : this.findings[this.finding];
    const start = finding?.nodes[0] ?? finding?.path[0];
    const pairs = new Set<string>();
    if (finding && start !== undefined)
      for (const pair of [...pairsOf(finding.path), ...pairsOf(wayBack(this.flow, start))]) pairs.add(pair);
    this.graph.way(pairs);
  }

  clearFinding(): void {
    this.finding = null;
    this.drawWay();
    this.tell("finding");
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  setNorm(norm: Norm): void {
    this.facts.norm = norm;
    this.repaint();
  }

  setFilter(name: string): void {
    this.filter = name;
    this.graph.dim(filterOf(name, this.facts));
    this.tell("paint");
  }

  step(event: number): void {
    if (this.series === null) return;
    this.series.at = Math.min(this.series.count - 1, Math.max(0, event));
    this.facts.reading = this.series.reading();
    this.repaint();
  }

  repaint(): void {
    this.facts.renew();
    this.graph.paint();
    this.graph.dim(filterOf(this.filter, this.facts));
    this.profile.renew();
    this.showPanel();
    this.tell("paint");
  }

  say(words: string): void {
    this.parts.status.textContent = words;
  }

  // ---- the address -------------------------------------------------------------------------------------------------

  get address(): Address {
    const open = [...this.open].sort();
    return {
      open: open.join("\n") === [...this.first].sort().join("\n") ? null : open,
      at: this.chosen?.item.id ?? null,
      norm: this.facts.norm === this.payload.norm ? null : this.facts.norm,
      finding: this.finding,
      filter: this.filter || null,
      step: this.series === null || this.series.full ? null : this.series.at,
      view: this.view.transform,
    };
  }

  /** Soon, and not at each movement: browsers allow few changes of the address a second. */
  private remember(): void {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      try {
        history.replaceState(null, "", `#${write(this.address)}`);
      } catch {
        this.timer = 0; // a frame in a notebook has no address of its own
      }
    }, 250);
  }
}
