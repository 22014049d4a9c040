/** The shapes of small charts. */

/** A line that keeps each value until the next point, as the points of an SVG path. */
export function chartLine(x: number[], y: number[]): string[] {
  return x.flatMap((at, i) => {
    const value = (y[i] ?? 0).toFixed(2);
    const before = y[i - 1];
    return before === undefined
      ? [`${at.toFixed(2)} ${value}`]
      : [`${at.toFixed(2)} ${before.toFixed(2)}`, `${at.toFixed(2)} ${value}`];
  });
}

/** An SVG element. */
export function shape(name: 'svg' | 'path', attributes: Record<string, string>): SVGElement {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
