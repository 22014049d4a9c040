//! Buffers that each layer has for itself although all are the same: masks, tables of positions. One for the whole
//! model is enough, and a mask that only hides later tokens needs none in `scaled_dot_product_attention`.
//!
//! A recording has names, sizes and shapes of buffers, and no values. Their names tell what they hold.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::definition::TensorKind;

use super::change::{Change, ChangedBlocks, Cost, Order, SuggestionRule, Value};
use super::facts::Facts;
use super::recorded::Recorded;
use crate::passes::category::Category;
use crate::passes::lifetimes::BEFORE_STEPS;
use crate::passes::phase::Phase;
use crate::rules::RuleId;

pub(super) static RULE: SuggestionRule = SuggestionRule {
    id: RuleId::ShareBuffers,
    action: "one buffer for all modules instead of {count} times {name}",
    condition: "Several modules have a buffer of one name and shape, and the name says that it holds a mask or a table \
                of positions.",
    method: "All of these buffers but the first vanish. Where scaled_dot_product_attention runs, square masks all \
             vanish: is_causal=True needs none.",
    cost: Cost::Free,
    code: &[
        "# once, in the model, instead of {name} in each module",
        r#"self.register_buffer("shared", table, persistent=False)"#,
        "x = layer(x, self.shared)  # each layer gets it",
    ],
    link: "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer",
    at_most: false,
    programs: &["masks", "rotary"],
    find,
};

const WITHOUT_MASKS: &str =
    "is_causal=True of scaled_dot_product_attention instead of {count} times {name}, if they only hide later tokens";

/// Parts of the names of buffers whose values follow from their shape.
const TABLES: &[&str] = &["mask", "cos", "sin", "freqs", "triu", "tril", "relative_position", "alibi", "pos_emb"];
/// Whole names of such buffers that are square. GPT-2 names its causal mask `bias`.
const SQUARE_TABLES: &[&str] = &["bias", "causal"];
/// The buffers are worth a change if together they are at least 2 % (1/50) of the peak.
const WORTH_CHANGING: u64 = 50;

/// Equal buffers of several modules.
#[derive(Debug)]
struct ShareBuffers {
    name: String,
    /// The indices of their blocks, in order.
    blocks: Vec<u32>,
    are_needless: bool,
}

/// A buffer by its name without the module's path, and its shape.
type NameAndShape<'a> = (&'a str, &'a str);

fn find(facts: &Facts<'_>) -> Option<Box<dyn Change>> {
    let recorded = &facts.recorded;
    let mut buffers: BTreeMap<NameAndShape<'_>, BTreeSet<&str>> = BTreeMap::new();
    let names = recorded.definitions.tensor_names.iter();
    for named in names.filter(|named| named.kind == TensorKind::Buffer) {
        let (module, name) = named.name.rsplit_once('.').unwrap_or(("", &named.name));
        if is_table(name, is_square(&named.shape)) {
            buffers.entry((name, &named.shape)).or_default().insert(module);
        }
    }
    let found = buffers.into_iter().filter_map(|((name, shape), modules)| {
        let blocks = buffers_of_size(facts, bytes_of(shape)?, modules.len());
        let bytes: u64 = blocks.iter().map(|index| recorded.blocks[*index as usize].size()).sum();
        let is_worth = modules.len() > 1 && blocks.len() == modules.len() && bytes >= facts.peak / WORTH_CHANGING;
        let are_needless = name.contains("mask") && is_square(shape) && has_fused_attention(recorded);
        is_worth.then(|| (bytes, ShareBuffers { name: name.to_owned(), blocks, are_needless }))
    });
    let (_, largest) = found.max_by_key(|(bytes, _)| *bytes)?;
    Some(Box::new(largest))
}

impl Change for ShareBuffers {
    fn rule(&self) -> &'static SuggestionRule {
        &RULE
    }

    fn order(&self) -> Order {
        Order::Kept
    }

    fn apply(&self, _facts: &Facts<'_>, blocks: &mut ChangedBlocks) {
        let stay = usize::from(!self.are_needless);
        self.blocks.iter().skip(stay).for_each(|index| blocks.spans[*index as usize].vanish());
    }

    fn phases(&self) -> &'static [Phase] {
        &[Phase::Load, Phase::Eval, Phase::Generate, Phase::Rollout, Phase::Optimizer]
    }

    fn action(&self) -> &'static str {
        if self.are_needless { WITHOUT_MASKS } else { RULE.action }
    }

    fn values(&self, _facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
        let count = self.blocks.len().to_string();
        vec![("count", Value::Text(count)), ("name", Value::Text(self.name.clone()))]
    }
}

/// Whether a buffer of this name, without the module's path, holds values that follow from its shape.
fn is_table(name: &str, is_square: bool) -> bool {
    let words: Vec<&str> = name.split('_').collect();
    let has = |table: &&str| if table.contains('_') { name.contains(*table) } else { words.contains(table) };
    TABLES.iter().any(has) || name.contains("mask") || is_square && SQUARE_TABLES.contains(&name)
}

/// The dimensions of a shape such as `float32[12, 64]`.
fn dimensions(shape: &str) -> Option<Vec<u64>> {
    let inner = shape.split_once('[')?.1.strip_suffix(']')?;
    inner.split(',').map(|length| length.trim().parse().ok()).collect()
}

fn is_square(shape: &str) -> bool {
    matches!(dimensions(shape).as_deref(), Some([.., rows, columns]) if rows == columns)
}

/// The bytes of a tensor of this data type and shape, such as `float32[12, 64]`.
fn bytes_of(shape: &str) -> Option<u64> {
    let data_type = shape.split_once('[')?.0;
    let digits = data_type.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    let bits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    let size = if data_type == "bool" { 1 } else { bits.parse::<u64>().ok()? / 8 };
    dimensions(shape)?.into_iter().try_fold(size, u64::checked_mul)
}

/// The first `count` blocks of this size that the program made before its first step and still has at the peak.
fn buffers_of_size(facts: &Facts<'_>, bytes: u64, count: usize) -> Vec<u32> {
    let of_model = facts.recorded.blocks.iter().enumerate().filter(|(_, block)| {
        block.category == Category::Parameter && block.start.step == BEFORE_STEPS && block.includes(facts.peak_seq)
    });
    of_model.filter(|(_, block)| block.requested() == bytes).map(|(index, _)| index as u32).take(count).collect()
}

/// Whether a node of autograd belongs to `scaled_dot_product_attention`.
fn has_fused_attention(recorded: &Recorded<'_>) -> bool {
    recorded.definitions.contexts.iter().any(|context| context.node.starts_with("ScaledDotProduct"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tables_are_known() {
        for name in ["mask", "attn_mask", "causal_mask", "cos_cached", "sin", "freqs_cis", "relative_position_index"] {
            assert!(is_table(name, false), "{name}");
        }
        for name in ["running_mean", "qweight", "cosine_head", "k_cache", "bias", "scales", "basin"] {
            assert!(!is_table(name, false), "{name}");
        }
        assert!(is_table("bias", true), "the mask of GPT-2");
    }

    #[test]
    fn shapes_have_bytes() {
        assert_eq!(bytes_of("float32[12, 64]"), Some(12 * 64 * 4));
        assert_eq!(bytes_of("bool[1, 1, 8, 8]"), Some(64));
        assert_eq!(bytes_of("bfloat16[3]"), Some(6));
        assert_eq!(bytes_of("complex64[2, 2]"), Some(32));
        assert_eq!(bytes_of("float8_e4m3fn[4]"), Some(4));
        assert_eq!((bytes_of("shape"), bytes_of("float32[?]")), (None, None));
        assert!(is_square("bool[1, 1, 8, 8]") && !is_square("float32[8]") && !is_square("float32[4, 8]"));
    }
}
