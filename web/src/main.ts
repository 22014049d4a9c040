/**
 * Builds the page from its data: the report of a run, the comparison of two, the line table of a device, or the ranks
 * of a job.
 */

import './categories.css';
import './style.css';
import { dataOf } from './data/decode';
import { el, replace } from './dom';
import { comparisonPage } from './pages/comparison';
import { jobPage } from './pages/job';
import { linesPage } from './pages/lines';
import { reportPage } from './pages/report';

// The output of a notebook's cell. There is little room, and the lines of the cell come first.
if (window.parent !== window) document.documentElement.classList.add('embedded');

const app = document.getElementById('app') as HTMLElement;

async function main(): Promise<void> {
  const comparison = await dataOf('comparison');
  if (comparison) return comparisonPage(app, comparison);
  const lines = await dataOf('line-table');
  if (lines) return linesPage(app, lines);
  const job = await dataOf('job');
  if (job) return jobPage(app, job);
  const summary = await dataOf('summary');
  if (!summary) throw new Error('the page has no summary');
  return reportPage(app, summary);
}

main().catch((error: unknown) => {
  replace(
    app,
    el(
      'main',
      {},
      el(
        'section',
        { class: 'card w12' },
        el('strong', { class: 'bad' }, 'The page cannot show its data'),
        el('p', {}, String(error)),
      ),
    ),
  );
  console.error(error);
});
