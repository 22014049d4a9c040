//! The list of diagnostics. A new diagnostic changes this file, and has one of its own.

/// Calls the macro `$apply` with `$more` and the list. An entry has the module, its type that implements `Diagnostic`,
/// and the ids of its rules with their text forms. An id is never reused for something else.
///
/// A device's issues are found in this order. A diagnostic can see the issues of those before it.
macro_rules! with_diagnostics {
    ($apply:ident $($more:tt)*) => {
        $apply! {
            $($more)*
            growing: Growing {
                /// The blocks of one stack increase from step to step.
                Leak = "leak",
            }
            graphs: Graphs {
                /// The graphs of several calls of a model are allocated at once.
                GraphKept = "graph-kept",
                /// A backward pass retained its graph.
                GraphRetained = "graph-retained",
                /// Forward passes without a backward pass keep their activations.
                EvalWithoutNoGrad = "eval-without-no-grad",
            }
            gradients: Gradients {
                /// Gradients stay allocated through the next forward pass because nothing frees them.
                GradientsNotCleared = "gradients-not-cleared",
                /// Gradients are freed between forward and backward.
                GradientsClearedLate = "gradients-cleared-late",
            }
            reference_cycle: ReferenceCycles {
                /// Reference cycles held memory until the garbage collector ran.
                ReferenceCycle = "reference-cycle",
            }
            checkpoint: Checkpoints {
                /// A checkpoint stays allocated beside the model that it was copied into.
                CheckpointKept = "checkpoint-kept",
                /// A checkpoint was read to a device that computes nothing.
                WrongDevice = "wrong-device",
            }
            fragmentation: Fragmentation {
                /// Blocks in use block segments whose free memory the allocator could not use.
                Fragmentation = "fragmentation",
            }
            ddp_buckets: DdpBuckets {
                /// DistributedDataParallel holds a second copy of the gradients.
                DdpBuckets = "ddp-buckets",
            }
            cublas_workspaces: CublasWorkspaces {
                /// cuBLAS has many workspaces.
                CublasWorkspaces = "cublas-workspaces",
            }
            optimizer_state: OptimizerState {
                /// The optimizer state does not fit.
                OptimizerStateDoesNotFit = "optimizer-state-does-not-fit",
            }
            deferred_frees: DeferredFrees {
                /// Frees wait for streams.
                DeferredFrees = "deferred-frees",
            }
            outputs_kept: OutputsKept {
                /// Results of a forward pass stay allocated through the next forward pass.
                OutputsKept = "outputs-kept",
            }
            stream_caches: StreamCaches {
                /// Streams have caches that no other stream can use.
                StreamCaches = "stream-caches",
            }
            spilled_to_host: SpilledToHost {
                /// Allocations beyond the device's memory succeed, so a part is on the host.
                SpilledToHost = "spilled-to-host",
            }
            windows: Windows {}
            stray_context: StrayContexts {
                /// A process holds memory on a GPU that is another rank's.
                StrayContext = "stray-context",
                /// A DataLoader worker holds memory on a GPU.
                WorkerContext = "worker-context",
            }
        }
    };
}

pub(crate) use with_diagnostics;
