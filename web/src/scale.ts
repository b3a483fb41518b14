// The fixed scale: how many decades a norm lies from the loss side, and how numbers are written.

import type { Palette } from "./data.ts";

export function decadesOf(value: number, reference: number): number {
  if (Number.isNaN(value) || value < 0) return Number.NaN;
  if (value === 0) return Number.NEGATIVE_INFINITY;
  return Math.log10(value) - Math.log10(reference);
}

/** Place among the colours: that of the nearest whole number of decades; of two equally near ones the even, as in Python. */
export function colourPlace(decades: number, palette: Palette): number {
  const most = palette.decades;
  const held = Math.min(Math.max(decades, -most), most);
  const low = Math.floor(held);
  const rest = held - low;
  const whole = rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
  return whole + most;
}

/** Three significant digits, as Python's `%.3g` writes them. */
export function words(value: number | null, digits = 3): string {
  if (value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (value === 0) return "0";
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= digits) {
    const sign = exponent < 0 ? "-" : "+";
    return `${trimmed(mantissa)}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  return trimmed(value.toFixed(Math.max(0, digits - 1 - exponent)));
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

export function power(decades: number): string {
  if (decades === 0) return "1";
  const digits = [...String(Math.abs(decades))].map((digit) => RAISED[Number(digit)]).join("");
  return `10${decades < 0 ? "⁻" : ""}${digits}`;
}

export function short(text: string, room: number): string {
  if (text.length <= room) return text;
  const head = Math.max(1, Math.floor(((room - 1) * 2) / 5));
  return `${text.slice(0, head)}…${text.slice(text.length - (room - 1 - head))}`;
}
