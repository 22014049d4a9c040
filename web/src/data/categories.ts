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

/** The names of categories in reports. */
export const CATEGORY_TEXTS: Readonly<Record<Category, string>> = {
  parameter: 'parameters',
  optimizer_state: 'optimizer state',
  checkpoint: 'loaded checkpoint',
  communication_bucket: 'communication buckets',
  workspace: 'cuBLAS workspaces',
  kv_cache: 'KV cache',
  kept_tensor: 'kept tensors',
  graph_pool: 'CUDA graph pool',
  memory_pool: 'memory pool',
  autocast_cache: 'autocast weights',
  input: 'inputs',
  activation: 'activations',
  gradient: 'gradients',
  autograd_detail: 'autograd temporaries',
  temporary: 'temporaries',
  unknown: 'other',
};
