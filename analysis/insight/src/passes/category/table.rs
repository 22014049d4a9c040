//! The categories, with their names, their order and their colors: the one table of them.
//!
//! The style sheet and the scripts of pages are generated from it (`analysis/tests/it/categories.rs`). CONTRIBUTING.md
//! names what else a new category needs.

use serde::{Deserialize, Serialize};

/// The texts and colors of a category.
struct Entry {
    name: &'static str,
    plural: &'static str,
    layer: usize,
    light: u32,
    dark: u32,
    terminal: &'static str,
}

/// Declares [`Category`], the list of all, and their entries.
macro_rules! categories {
    ($(
        $(#[$meaning:meta])+
        $category:ident: $name:literal, $plural:literal, $layer:literal,
            $light:literal, $dark:literal, $terminal:literal;
    )+) => {
        /// The purpose of a block. The first seven categories are those of PyTorch's own memory timeline.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[derive(Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum Category {
            $($(#[$meaning])+ $category,)+
        }

        impl Category {
            /// All categories, in the order in which reports list them.
            pub const ALL: [Category; [$($name),+].len()] = [$(Category::$category),+];

            const fn entry(self) -> Entry {
                match self {
                    $(Category::$category => Entry {
                        name: $name,
                        plural: $plural,
                        layer: $layer,
                        light: $light,
                        dark: $dark,
                        terminal: $terminal,
                    },)+
                }
            }
        }
    };
}

// Name in files; name in reports; place in stacked charts, from 0 at the bottom; color on a light and on a dark ground;
// color of a terminal (SGR). `web/test/colors.test.mjs` checks the contrast of the colors, and that readers who do not
// see all colors distinguish common categories.
categories! {
    /// Parameters and buffers.
    Parameter: "parameter", "parameters", 0, 0x1e4bab, 0x5288d3, "32";
    /// Gradients of parameters.
    Gradient: "gradient", "gradients", 12, 0x008c67, 0x39dba7, "33";
    /// Optimizer state.
    OptimizerState: "optimizer_state", "optimizer state", 1, 0xd97d00, 0xf3993a, "35";
    /// Results of the forward pass.
    Activation: "activation", "activations", 11, 0xe73957, 0xdd643b, "34";
    /// Autograd temporaries: what a backward node passes to the next.
    AutogradDetail: "autograd_detail", "autograd temporaries", 13, 0x9f5aa4, 0xd89dff, "37";
    /// Input batches.
    Input: "input", "inputs", 10, 0x577612, 0xdfe14f, "36";
    /// Blocks that are freed within the call that allocates them, or within a phase other than forward and backward.
    Temporary: "temporary", "temporaries", 14, 0x8c91a6, 0x9b979c, "37";
    /// Scratch memory that a library keeps, such as cuBLAS workspaces.
    Workspace: "workspace", "cuBLAS workspaces", 4, 0x59636f, 0x8a96a6, "37";
    /// Buckets and gathered shards of DistributedDataParallel, FSDP and similar wrappers.
    CommunicationBucket: "communication_bucket", "communication buckets", 3, 0x3f3fa8, 0x8286e8, "37";
    /// Copies of weights in lower precision that autocast keeps.
    AutocastCache: "autocast_cache", "autocast weights", 9, 0x007f8b, 0x35c4cf, "37";
    /// A loaded checkpoint beside the model that it was loaded into.
    Checkpoint: "checkpoint", "loaded checkpoint", 2, 0x7b4a12, 0xb98550, "37";
    /// Keys and values (or other state) that the model of an inference-only program keeps across calls.
    KvCache: "kv_cache", "KV cache", 5, 0x6a2fa0, 0xb07be6, "37";
    /// Tensors that the program itself keeps across steps: replay buffers, queues, copies of weights, results.
    KeptTensor: "kept_tensor", "kept tensors", 6, 0x9c1c45, 0xe8648c, "37";
    /// Memory of a private pool into which a CUDA graph was captured.
    GraphPool: "graph_pool", "CUDA graph pool", 7, 0x4d6b12, 0x93bf52, "37";
    /// Memory of another private pool (`torch.cuda.MemPool`).
    MemoryPool: "memory_pool", "memory pool", 8, 0x7d5f8f, 0xbda0cf, "37";
    /// Blocks that no rule matches.
    Unknown: "unknown", "other", 15, 0x949494, 0x7a8390, "37";
}

impl Category {
    /// All categories, in the order in which charts stack them: from the bottom, those whose blocks live longest first.
    pub const STACKED: [Category; Category::ALL.len()] = {
        let mut stacked = Category::ALL;
        let mut at = 0;
        while at < stacked.len() {
            stacked[Category::ALL[at].entry().layer] = Category::ALL[at];
            at += 1;
        }
        at = 0;
        while at < stacked.len() {
            assert!(stacked[at].entry().layer == at, "each category has a layer of its own");
            at += 1;
        }
        stacked
    };

    /// The category with this name in files.
    pub fn named(name: &str) -> Option<Category> {
        Category::ALL.into_iter().find(|category| category.name() == name)
    }

    /// The name in files.
    pub const fn name(self) -> &'static str {
        self.entry().name
    }

    /// The plural name in reports.
    pub const fn plural(self) -> &'static str {
        self.entry().plural
    }

    /// The color on a light ground, as `0xRRGGBB`.
    pub const fn light_color(self) -> u32 {
        self.entry().light
    }

    /// The color on a dark ground, as `0xRRGGBB`.
    pub const fn dark_color(self) -> u32 {
        self.entry().dark
    }

    /// The color in a terminal, as the parameter of the control sequence SGR.
    pub const fn terminal_color(self) -> &'static str {
        self.entry().terminal
    }

    /// Whether blocks of this category are normally freed within the phase that allocated them.
    pub const fn is_passing(self) -> bool {
        matches!(self, Category::Temporary | Category::AutogradDetail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        for category in Category::ALL {
            assert_eq!(serde_json::to_value(category).unwrap(), category.name());
            assert_eq!(Category::named(category.name()), Some(category));
        }
    }
}
