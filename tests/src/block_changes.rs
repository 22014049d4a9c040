//! The changes of memory that an exported table of blocks has.

use memtrace_analysis::Process;
use memtrace_analysis::export::{Window, blocks_csv};
use memtrace_analysis::passes::Category;

/// The allocation or the free of a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct BlockChange {
    /// The number of the event.
    pub seq: u64,
    /// The time of the event, in nanoseconds since 1970.
    pub time_ns: u64,
    /// Negative for a free.
    pub bytes: i64,
    /// The category of the block.
    pub category: Category,
}

impl BlockChange {
    /// The number of the category in PyTorch's memory timelines (`torch.profiler._memory_profiler`).
    pub fn pytorch_category(&self) -> usize {
        match self.category {
            Category::Parameter => 0,
            Category::OptimizerState => 1,
            Category::Input => 2,
            Category::Temporary => 3,
            Category::Activation => 4,
            Category::Gradient => 5,
            Category::AutogradDetail => 6,
            _ => 7,
        }
    }
}

/// All changes of a device, in order, from the table of blocks (`--to csv`).
pub fn block_changes(process: &Process, device: i16) -> Vec<BlockChange> {
    let mut table = Vec::new();
    blocks_csv(process, &Window::WHOLE, None, &mut table, &mut |_| {}).unwrap();
    let text = String::from_utf8(table).unwrap();
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let column = |name: &str| columns.iter().position(|c| *c == name).unwrap();
    let mut changes = Vec::new();
    for line in lines {
        // The fields that may contain commas are the last ones.
        let fields: Vec<&str> = line.split(',').collect();
        let field = |name: &str| fields[column(name)];
        if field("device") != device.to_string() {
            continue;
        }
        let size: i64 = field("size").parse().unwrap();
        let category = Category::named(field("category")).unwrap();
        let mut add = |seq: &str, time: &str, bytes: i64| {
            if let (Ok(seq), Ok(time_ns)) = (field(seq).parse(), field(time).parse()) {
                changes.push(BlockChange { seq, time_ns, bytes, category });
            }
        };
        add("alloc_seq", "alloc_ns", size);
        add("free_seq", "free_ns", -size);
    }
    changes.sort_unstable();
    changes
}
