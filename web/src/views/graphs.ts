/** What each CUDA graph costs, and the private memory pools of PyTorch's allocator. */

import type { CudaGraphSummary, DeviceSummary, MemoryPoolSummary } from '../data/schema';
import { el, scrollTable } from '../dom';
import * as format from '../format';
import { bytes } from './figures';

/** The maximum number of rows of each table. */
const ROWS = 100;

function graphRow(graph: CudaGraphSummary, at: number): HTMLElement {
  const field = `cuda_graphs.graphs.${at}`;
  const batch = graph.first_dimension === undefined ? '' : String(graph.first_dimension);
  const place = [
    graph.label ? ` [${graph.label}]` : '',
    graph.is_captured ? '' : ' built from nodes',
    graph.is_destroyed ? ' (destroyed)' : '',
  ].join('');
  return el(
    'tr',
    {},
    el('td', { class: 'n' }, String(graph.index)),
    el('td', { class: 'n' }, batch),
    el('td', { class: 'n' }, bytes(`${field}.pool_growth_bytes`, graph.pool_growth_bytes)),
    el('td', { class: 'n' }, bytes(`${field}.kept_bytes`, graph.kept_bytes)),
    el('td', { class: 'n wide' }, bytes(`${field}.instantiated_bytes`, graph.instantiated_bytes)),
    el('td', { class: 'n wide' }, graph.nodes > 0 ? format.count(graph.nodes) : ''),
    el('td', {}, graph.pool ?? ''),
    el('td', { class: 'below' }, el('code', {}, graph.location), place),
  );
}

function poolRow(pool: MemoryPoolSummary, at: number): HTMLElement {
  const field = `cuda_graphs.pools.${at}`;
  return el(
    'tr',
    {},
    el('td', {}, `${pool.is_cuda_graph_pool ? 'CUDA graph pool' : 'memory pool'} ${pool.id}`),
    el('td', { class: 'n' }, bytes(`${field}.peak_reserved_bytes`, pool.peak_reserved_bytes)),
    el('td', { class: 'n' }, bytes(`${field}.peak_allocated_bytes`, pool.peak_allocated_bytes)),
    el('td', { class: 'n' }, format.count(pool.captures)),
  );
}

function leftOut(count: number): HTMLElement | null {
  return count > 0 ? el('p', { class: 'note' }, `${format.count(count)} more: see summary.json`) : null;
}

/** The card; `null` without graphs and pools. */
export function cudaGraphs(device: DeviceSummary): HTMLElement | null {
  const found = device.cuda_graphs;
  if (!found) return null;
  const graphs = found.graphs.slice(0, ROWS);
  const pools = found.pools.slice(0, ROWS);
  return el(
    'section',
    { class: 'card w12', id: 'graphs' },
    el('h2', {}, graphs.length > 0 ? 'CUDA graphs' : 'Memory pools'),
    graphs.length > 0
      ? [
          scrollTable(
            [
              ['Graph', 'n'],
              ['Batch', 'n'],
              ['Pool growth', 'n'],
              ['Kept', 'n'],
              ['Instantiated', 'n wide'],
              ['Nodes', 'n wide'],
              ['Pool'],
              ['Captured at', 'below'],
            ],
            graphs.map(graphRow),
          ),
          leftOut(found.count - graphs.length),
        ]
      : null,
    pools.length > 0
      ? [
          scrollTable(
            [['Private pool'], ['Peak reserved', 'n'], ['Peak allocated', 'n'], ['Captures', 'n']],
            pools.map(poolRow),
          ),
          leftOut(found.pools.length - pools.length),
        ]
      : null,
  );
}
