/** What the card of a launch and the page of a job share: the marks and cells of a rank's row, and the names in a comparison of two ranks. */

import { WITHOUT_EVENT } from './changes';

interface Ranked {
  ranks: unknown[];
  imbalance?: { worst_rank: number; median_rank: number; best_rank: number };
}

/** Marks the worst, the median and the best of more than two ranks. Empty for the others. */
export function rankMark(rank: number, { ranks, imbalance }: Ranked): string {
  if (!imbalance || ranks.length <= 2) return '';
  const { worst_rank, median_rank, best_rank } = imbalance;
  const marks = [
    [worst_rank, 'worst'],
    [median_rank, 'median'],
    [best_rank, 'best'],
  ] as const;
  const mark = marks.find(([of]) => of === rank);
  return mark ? ` (${mark[1]})` : '';
}

/** The cells of a rank's phases. `cell` makes one from the field of a figure, inside the rank, and its value. */
export function phaseCells<T>(rank: { phases: { phase: string; peak_bytes: number }[] }, phases: readonly string[], cell: (field: string, value: number | undefined) => T): T[] {
  return phases.map(wanted => {
    const found = rank.phases.findIndex(one => one.phase === wanted);
    return cell(`phases.${found}.peak_bytes`, rank.phases[found]?.peak_bytes);
  });
}

export function categoryName(category: string | undefined): string {
  return category ?? WITHOUT_EVENT;
}
