// The view in the address: what is after the # of the URL brings another reader to the same place.

import type { Norm } from "./data.ts";

export interface Address {
  open: string[] | null; // null: as at first
  at: string | null; // id of what is selected
  norm: Norm | null;
  finding: number | null;
  filter: string | null;
  step: number | null;
  view: [number, number, number] | null; // x, y and scale
}

const NORMS = ["l2_norm", "rms", "max_abs"];

export function write(address: Address): string {
  const parts: string[] = [];
  const put = (name: string, value: string | null): void => {
    if (value !== null && value !== "") parts.push(`${name}=${value}`);
  };
  put("at", address.at === null ? null : encodeURIComponent(address.at));
  put("open", address.open === null ? null : address.open.map(encodeURIComponent).join(",") || "-");
  put("norm", address.norm);
  put("finding", address.finding === null ? null : String(address.finding + 1));
  put("show", address.filter);
  put("step", address.step === null ? null : String(address.step));
  put("view", address.view === null ? null : address.view.map((one) => Number(one.toFixed(3))).join(","));
  return parts.join("&");
}

export function read(fragment: string): Address {
  const given = new Map<string, string>();
  for (const part of fragment.replace(/^#/, "").split("&")) {
    const [name, ...rest] = part.split("=");
    if (rest.length > 0) given.set(name, rest.join("="));
  }
  const text = (name: string): string | null => decoded(given.get(name) ?? "") || null;
  const whole = (name: string): number | null => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const open = given.get("open");
  const norm = text("norm");
  const finding = whole("finding");
  const view = (given.get("view") ?? "").split(",").map(Number);
  return {
    open: open === undefined ? null : open === "-" ? [] : open.split(",").map(decoded),
    at: text("at"),
    norm: norm !== null && NORMS.includes(norm) ? (norm as Norm) : null,
    finding: finding === null || finding < 1 ? null : finding - 1,
    filter: text("show"),
    step: whole("step"),
    view: view.length === 3 && view.every(Number.isFinite) && view[2] > 0 ? (view as [number, number, number]) : null,
  };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a % that nobody encoded
  }
}
