// The graph in its window: panning, zooming, and keeping in place what stays.

import { select } from "d3-selection";
import { type D3ZoomEvent, type ZoomBehavior, zoom, zoomIdentity, zoomTransform } from "d3-zoom";
import type { Place, Scene } from "./layout.ts";
import type { Room } from "./opening.ts";
import { fitScale } from "./opening.ts";

const MARGIN = 26;

export class View {
  touched = false; // whether somebody has moved it
  private size: Room = { width: 0, height: 0 };
  private readonly zoom: ZoomBehavior<SVGSVGElement, unknown>;

  constructor(
    readonly svg: SVGSVGElement,
    private readonly layer: SVGGElement,
    moved: () => void,
  ) {
    this.zoom = zoom<SVGSVGElement, unknown>()
      .scaleExtent([0.05, 4])
      .filter((event: MouseEvent) => event.type !== "dblclick" && !event.button)
      .on("zoom", (event: D3ZoomEvent<SVGSVGElement, unknown>) => {
        if (event.sourceEvent) this.touched = true;
        this.layer.setAttribute("transform", event.transform.toString());
        moved();
      });
    this.resize();
    this.zoom.extent(() => [
      [0, 0],
      [this.size.width, this.size.height],
    ]);
    select(svg).call(this.zoom);
  }

  /** Takes the size that the window has now; asking for it at each movement would lay the whole page out each time. */
  resize(): void {
    const { width, height } = this.svg.getBoundingClientRect();
    this.size = { width, height };
  }

  get room(): Room {
    const box = this.size;
    return { width: Math.max(200, box.width - 2 * MARGIN), height: Math.max(200, box.height - 2 * MARGIN) };
  }

  get transform(): [number, number, number] {
    const { x, y, k } = zoomTransform(this.svg);
    return [x, y, k];
  }

  to(x: number, y: number, k: number): void {
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate(x, y).scale(k));
  }

  by(factor: number): void {
    this.touched = true;
    select(this.svg).call(this.zoom.scaleBy, factor);
  }

  pan(dx: number, dy: number): void {
    const [x, y, k] = this.transform;
    this.to(x + dx, y + dy, k);
  }

  /** All of it, in the middle. */
  fit(scene: Scene): void {
    this.touched = false;
    this.resize();
    const k = fitScale(scene, this.room);
    const box = this.size;
    const x = (box.width - scene.width * k) / 2;
    const y = Math.max(MARGIN * 0.7, (box.height - scene.height * k) / 2);
    this.to(x, y, k);
  }

  /** Moves the view so that what lay at one place before is seen where it was. */
  keep(before: Place | null, after: Place | null): void {
    if (before === null || after === null) return;
    this.touched = true;
    const [x, y, k] = this.transform;
    this.to(x + (before.x - after.x) * k, y + (before.y - after.y) * k, k);
  }

  /** Brings a place into the window, at a scale at which it can be read. */
  show(place: Place): void {
    const [x, y, k] = this.transform;
    const box = this.size;
    const readable = Math.max(k, 0.75);
    const left = place.x * k + x;
    const top = place.y * k + y;
    const inside =
      left >= 10 && top >= 10 && left + place.width * k <= box.width - 10 && top + place.height * k <= box.height - 10;
    if (inside && readable === k) return;
    this.touched = true;
    const height = Math.min(place.height, box.height / readable);
    this.to(
      box.width / 2 - (place.x + place.width / 2) * readable,
      box.height / 2 - (place.y + height / 2) * readable,
      readable,
    );
  }
}
