/** Formats figures as the terminal report does: binary units, three significant digits. */

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

function digits(value: number): string {
  if (value >= 99.95) return value.toFixed(0);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** `18.6 GiB`, `512 B`, `0`. */
export function size(bytes: number): string {
  if (bytes === 0) return '0';
  let value = Math.abs(bytes);
  let unit = 0;
  // 1023.5 would be printed as 1024.
  while (value >= 999.5 && unit + 1 < UNITS.length) {
    value /= 1024;
    unit += 1;
  }
  const sign = bytes < 0 ? '-' : '';
  return unit === 0 ? `${sign}${value} B` : `${sign}${digits(value)} ${UNITS[unit]}`;
}

/** `+18.6 GiB`, `-3.00 MiB`, `0`. */
export function signedSize(bytes: number): string {
  return bytes > 0 ? `+${size(bytes)}` : size(bytes);
}

/** `1,234,567`. */
export function count(value: number): string {
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, ',');
}

/** `1 block`, `24 blocks`. */
export function number(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? '' : 's'}`;
}

/** A share of a whole: `11 %`, `<1 %`. */
export function share(part: number, whole: number): string {
  if (whole <= 0 || part <= 0) return part > 0 ? '' : '0 %';
  const percent = (100 * part) / whole;
  return percent < 1 ? '<1 %' : `${Math.round(percent)} %`;
}

/** A duration in microseconds: `41 s`, `3 min 20 s`, `12.3 ms`. */
export function duration(us: number): string {
  const seconds = us / 1e6;
  if (seconds < 0.001) return `${Math.round(us)} \u00b5s`;
  if (seconds < 1) return `${digits(us / 1000)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The distance between axis labels: 1, 2 or 5 times a power of ten, so that at most `steps` of them reach `most`. */
export function labelStep(most: number, steps: number): number {
  const rough = Math.max(most / steps, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(digit => digit * power).find(step => step >= rough * (1 - 1e-9)) ?? 10 * power;
}

/** The unit in which a memory axis up to `most` bytes is labeled, and its bytes. */
export function byteUnit(most: number): [string, number] {
  let unit = 0;
  while (unit + 1 < UNITS.length && most >= 1024 ** (unit + 1)) unit += 1;
  return [UNITS[unit] as string, 1024 ** unit];
}

/** A label with just enough decimals to distinguish labels `step` apart. */
export function axisLabel(value: number, step: number): string {
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
