/** Light and dark. Colors are variables of the style sheet, so that pictures and tables have the same. */

const listeners: (() => void)[] = [];
let values = new Map<string, string>();

function changed(): void {
  values = new Map();
  for (const listener of listeners) listener();
}

export function onThemeChange(listener: () => void): void {
  listeners.push(listener);
}

/** The value of a variable of the style sheet. */
export function color(name: string): string {
  let value = values.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || '#888888';
    values.set(name, value);
  }
  return value;
}

/** The parts of a color `#rrggbb`, or `#rgb` as the build shortens it. */
export function rgb(value: string): [number, number, number] {
  if (value.length === 4) return rgb(`#${[...value.slice(1)].map(digit => digit + digit).join('')}`);
  const bits = Number.parseInt(value.slice(1), 16);
  return [(bits >> 16) & 255, (bits >> 8) & 255, bits & 255];
}

const preference = matchMedia('(prefers-color-scheme: dark)');
let chosen = false;

function use(isDark: boolean): void {
  document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
  changed();
}

/** Switches between light and dark. From then on, the page no longer follows the system. */
export function toggleTheme(): void {
  chosen = true;
  use(document.documentElement.dataset.theme !== 'dark');
}

use(preference.matches);
preference.addEventListener('change', () => {
  if (!chosen) use(preference.matches);
});

// Paper is white.
let onScreen = 'light';
matchMedia('print').addEventListener('change', ({ matches }) => {
  if (matches) onScreen = document.documentElement.dataset.theme ?? 'light';
  use(!matches && onScreen === 'dark');
});
