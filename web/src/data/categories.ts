/** All categories, from the bottom of charts to the top. Generated: see analysis/tests/it/categories.rs. */

import type { Category } from './schema';

export const CATEGORIES: readonly Category[] = [
  'parameter',
  'optimizer_state',
  'checkpoint',
  'communication_bucket',
  'workspace',
  'kv_cache',
  'kept_tensor',
  'graph_pool',
  'memory_pool',
  'autocast_cache',
  'input',
  'activation',
  'gradient',
  'autograd_detail',
  'temporary',
  'unknown',
];
