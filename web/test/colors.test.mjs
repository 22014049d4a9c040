// The colors of categories: contrast with the card in both themes, and distinguishable for color-blind readers.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

const DARK = ":root[data-theme='dark'] {";

/** The colors of a style sheet, those on a light and those on a dark ground. */
function colorsOf(file) {
  const css = readFileSync(new URL(`../src/${file}`, import.meta.url), 'utf8');
  return [':root {', DARK].map(selector => {
    const rule = css.slice(css.indexOf(selector));
    const found = rule.slice(0, rule.indexOf('\n}')).matchAll(/--([\w-]+): (#[0-9a-f]{6})/g);
    return Object.fromEntries([...found].map(match => [match[1], match[2]]));
  });
}

const [sheet, categories] = ['style.css', 'categories.css'].map(colorsOf);
const themes = { light: { ...sheet[0], ...categories[0] }, dark: { ...sheet[1], ...categories[1] } };

const linear = hex =>
  [1, 3, 5]
    .map(at => Number.parseInt(hex.slice(at, at + 2), 16) / 255)
    .map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
const luminance = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
const contrast = (a, b) => {
  const [low, high] = [luminance(linear(a)), luminance(linear(b))].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

// Machado, Oliveira and Fernandes (2009), severity 1: what a reader without one kind of cone sees.
const BLIND = {
  none: [1, 0, 0, 0, 1, 0, 0, 0, 1],
  protan: [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
  deutan: [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
  tritan: [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
};
const seen = (rgb, m) =>
  [0, 3, 6].map(row => Math.min(1, Math.max(0, m[row] * rgb[0] + m[row + 1] * rgb[1] + m[row + 2] * rgb[2])));
// OKLab, in which distances are about equally visible.
const oklab = ([r, g, b]) => {
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
};
const distance = (a, b, blind) => {
  const [x, y] = [a, b].map(hex => oklab(seen(linear(hex), BLIND[blind])));
  return Math.hypot(x[0] - y[0], x[1] - y[1], x[2] - y[2]);
};

// The categories of nearly every training run. Others are rare, and have their names beside them.
const COMMON = ['parameter', 'optimizer_state', 'input', 'activation', 'gradient', 'autograd_detail', 'temporary'];

for (const [theme, colors] of Object.entries(themes)) {
  test(`contrast in the ${theme} theme`, () => {
    for (const [name, value] of Object.entries(colors).filter(([name]) => name.startsWith('category-'))) {
      assert.ok(contrast(value, colors.card) >= 3, `${name}: ${contrast(value, colors.card).toFixed(2)}`);
    }
    for (const name of ['ink', 'mute', 'ok', 'bad', 'accent']) {
      assert.ok(
        contrast(colors[name], colors.card) >= 4.5,
        `${name}: ${contrast(colors[name], colors.card).toFixed(2)}`,
      );
    }
  });
  test(`common categories differ for every reader in the ${theme} theme`, () => {
    for (const blind of Object.keys(BLIND)) {
      for (let i = 0; i < COMMON.length; i++) {
        for (let j = 0; j < i; j++) {
          const far = distance(colors[`category-${COMMON[i]}`], colors[`category-${COMMON[j]}`], blind);
          assert.ok(far >= 0.075, `${blind}: ${COMMON[i]} and ${COMMON[j]}: ${far.toFixed(3)}`);
        }
      }
    }
  });
}
