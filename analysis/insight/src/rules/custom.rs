//! The user's own categories (`--categories FILE`): rules of a name and regular expressions. The first rule that
//! matches a block gives its custom category. `docs/how-to/custom-categories.md` describes the file.
//!
//! An expression is matched in time linear in the text, and its size is bounded, so no file makes an analysis hang.

use memtrace_trace::named;
use std::fmt;

use regex_lite::{Regex, RegexBuilder};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// The maximum number of rules in a file.
pub const MAX_CUSTOM_RULES: usize = 256;
/// The maximum length of a category's name, in characters.
const MAX_NAME: usize = 64;
/// The maximum size of a compiled expression, in bytes.
const MAX_EXPRESSION: usize = 1 << 20;
/// The name of the remainder: the blocks that no rule matches.
pub const NO_CUSTOM_CATEGORY: &str = "none of the rules";

named! {
    /// The text that an expression is matched against.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum CustomField {
        /// Each frame of the block's stack, as `file:line function`.
        Stack => "stack",
        /// The path of the block's `nn.Module`, and the class of each module on the way to it.
        Module => "module",
        /// Each name of the block's tensor.
        Tensor => "tensor",
        /// The autograd node that allocated the block.
        Node => "node",
    }
}

/// A custom category, by its number in [`CustomRules::categories`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CustomCategory(u16);

impl CustomCategory {
    /// The category of the first rule. No other category is smaller.
    pub const FIRST: CustomCategory = CustomCategory(0);
    /// No rule matches, or there are no rules. No other category is larger.
    pub const NONE: CustomCategory = CustomCategory(u16::MAX);

    /// The place in [`CustomRules::categories`]; `None` for [`Self::NONE`].
    pub fn number(self) -> Option<usize> {
        (self != CustomCategory::NONE).then_some(self.0.into())
    }
}

impl Default for CustomCategory {
    fn default() -> CustomCategory {
        CustomCategory::NONE
    }
}

/// One rule. A block must match every expression of the rule.
#[derive(Clone, Debug)]
pub struct CustomRule {
    /// The name of its category.
    pub name: Box<str>,
    /// By field, in the order of [`CustomField::ALL`].
    expressions: [Option<Regex>; CustomField::ALL.len()],
    category: CustomCategory,
}

impl PartialEq for CustomRule {
    fn eq(&self, other: &CustomRule) -> bool {
        let texts = |rule: &CustomRule| rule.expressions.clone().map(|one| one.map(|one| one.as_str().to_owned()));
        self.name == other.name && texts(self) == texts(other)
    }
}

impl Eq for CustomRule {}

impl CustomRule {
    /// The expression for a field; `None` if any content of the field matches.
    pub fn expression(&self, field: CustomField) -> Option<&Regex> {
        self.expressions[field as usize].as_ref()
    }

    /// Its category.
    pub fn category(&self) -> CustomCategory {
        self.category
    }
}

/// The rules of a file, in its order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CustomRules {
    rules: Vec<CustomRule>,
    /// The names of the categories, in the order of their first rules.
    categories: Vec<Box<str>>,
}

/// Why a file of rules cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CustomRulesError {
    /// The line of the file, from 1.
    pub line: usize,
    /// The error at that position.
    pub reason: String,
}

impl fmt::Display for CustomRulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for CustomRulesError {}

impl CustomRules {
    /// Parses a file.
    ///
    /// # Errors
    ///
    /// The first line that is no valid JSON, or no valid rule.
    pub fn parse(text: &str) -> Result<CustomRules, CustomRulesError> {
        let file: RulesFile = serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|e| {
            let text = e.to_string();
            let position = format!(" at line {} column {}", e.line(), e.column());
            let reason = text.strip_suffix(&position).unwrap_or(&text).to_owned();
            CustomRulesError { line: e.line().max(1), reason }
        })?;
        let mut rules = CustomRules { rules: file.categories, categories: Vec::new() };
        for rule in &mut rules.rules {
            let number = match rules.categories.iter().position(|name| *name == rule.name) {
                Some(number) => number,
                None => {
                    rules.categories.push(rule.name.clone());
                    rules.categories.len() - 1
                }
            };
            rule.category = CustomCategory(number as u16);
        }
        Ok(rules)
    }

    /// The rules.
    pub fn rules(&self) -> &[CustomRule] {
        &self.rules
    }

    /// The names of the categories, by [`CustomCategory`].
    pub fn categories(&self) -> impl Iterator<Item = (CustomCategory, &str)> {
        self.categories.iter().enumerate().map(|(number, name)| (CustomCategory(number as u16), &**name))
    }

    /// The name of a category; `None` for [`CustomCategory::NONE`].
    pub fn name(&self, category: CustomCategory) -> Option<&str> {
        self.categories.get(usize::from(category.0)).map(|name| &**name)
    }

    /// Whether any rule has an expression for this field.
    pub fn uses(&self, field: CustomField) -> bool {
        self.rules.iter().any(|rule| rule.expression(field).is_some())
    }
}

/// The content of a file.
struct RulesFile {
    categories: Vec<CustomRule>,
}

impl<'de> Deserialize<'de> for RulesFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RulesFile, D::Error> {
        struct FileVisitor;
        impl<'de> Visitor<'de> for FileVisitor {
            type Value = RulesFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with the key categories")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RulesFile, A::Error> {
                let mut categories: Option<Vec<CustomRule>> = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key != "categories" {
                        return Err(A::Error::custom(format!("unknown key {key}; the file has the key categories")));
                    }
                    if categories.is_some() {
                        return Err(A::Error::custom("the key categories occurs twice"));
                    }
                    categories = Some(map.next_value::<RuleList>()?.0);
                }
                match categories {
                    Some(categories) if !categories.is_empty() => Ok(RulesFile { categories }),
                    Some(_) => Err(A::Error::custom("categories has no rule")),
                    None => Err(A::Error::custom("the key categories is missing")),
                }
            }
        }
        deserializer.deserialize_map(FileVisitor)
    }
}

/// At most [`MAX_CUSTOM_RULES`] rules.
struct RuleList(Vec<CustomRule>);

impl<'de> Deserialize<'de> for RuleList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RuleList, D::Error> {
        struct ListVisitor;
        impl<'de> Visitor<'de> for ListVisitor {
            type Value = RuleList;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of rules")
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<RuleList, A::Error> {
                let mut rules = Vec::new();
                while let Some(rule) = list.next_element::<CustomRule>()? {
                    if rules.len() == MAX_CUSTOM_RULES {
                        return Err(A::Error::custom(format!("more than {MAX_CUSTOM_RULES} rules")));
                    }
                    rules.push(rule);
                }
                Ok(RuleList(rules))
            }
        }
        deserializer.deserialize_seq(ListVisitor)
    }
}

impl<'de> Deserialize<'de> for CustomRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<CustomRule, D::Error> {
        struct RuleVisitor;
        impl<'de> Visitor<'de> for RuleVisitor {
            type Value = CustomRule;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a rule: an object with the key name")
            }
            // An error here has the position of the rule's end, and an error in a value that of the value.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<CustomRule, A::Error> {
                let mut name: Option<Box<str>> = None;
                let mut expressions: [Option<Regex>; CustomField::ALL.len()] = [const { None }; CustomField::ALL.len()];
                while let Some(Key(key)) = map.next_key()? {
                    match key {
                        None if name.is_none() => name = Some(map.next_value::<Name>()?.0),
                        Some(field) if expressions[field as usize].is_none() => {
                            expressions[field as usize] = Some(map.next_value::<Expression>()?.0);
                        }
                        key => {
                            let key = key.map_or("name", CustomField::name);
                            return Err(A::Error::custom(format!("the key {key} occurs twice in one rule")));
                        }
                    }
                }
                let Some(name) = name else { return Err(A::Error::custom("a rule has no name")) };
                if expressions.iter().all(Option::is_none) {
                    return Err(A::Error::custom(format!(
                        "the rule {name} has no expression: add stack, module, tensor or node"
                    )));
                }
                Ok(CustomRule { name, expressions, category: CustomCategory::NONE })
            }
        }
        deserializer.deserialize_map(RuleVisitor)
    }
}

/// A key of a rule: a field, or `None` for the name.
struct Key(Option<CustomField>);
struct Name(Box<str>);
struct Expression(Regex);

/// Deserializes a text and converts it. An error gets the line of the text.
macro_rules! deserialize_text {
    ($type:ty, $expected:literal, $convert:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                struct TextVisitor;
                impl Visitor<'_> for TextVisitor {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$type, E> {
                        let convert: fn(&str) -> Result<$type, String> = $convert;
                        convert(text).map_err(E::custom)
                    }
                }
                deserializer.deserialize_str(TextVisitor)
            }
        }
    };
}

deserialize_text!(Key, "a key", |key| match CustomField::from_name(key) {
    Some(field) => Ok(Key(Some(field))),
    None if key == "name" => Ok(Key(None)),
    None => Err(format!("unknown key {key}; a rule has name, stack, module, tensor and node")),
});

deserialize_text!(Name, "a name", |name| {
    if name.trim().is_empty() || name.chars().count() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(format!("a name has 1 to {MAX_NAME} characters on one line"));
    }
    if name == NO_CUSTOM_CATEGORY {
        return Err(format!("the name {NO_CUSTOM_CATEGORY} stands for the blocks that no rule matches"));
    }
    Ok(Name(name.into()))
});

deserialize_text!(Expression, "a regular expression", |text| {
    let compiled = RegexBuilder::new(text).size_limit(MAX_EXPRESSION).build();
    compiled.map(Expression).map_err(|e| format!("invalid regular expression: {e}"))
});

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> (usize, String) {
        let error = CustomRules::parse(text).unwrap_err();
        (error.line, error.reason)
    }

    #[test]
    fn rules_of_one_name_are_one_category() {
        let rules = CustomRules::parse(
            r#"{"categories": [
                {"name": "attention", "stack": "attention\\.py:\\d+ ", "node": "^Sdpa"},
                {"name": "embeddings", "tensor": "wte|wpe"},
                {"name": "attention", "module": "(?i)attn"}
            ]}"#,
        )
        .unwrap();
        let categories: Vec<CustomCategory> = rules.rules().iter().map(CustomRule::category).collect();
        assert_eq!(categories, [CustomCategory(0), CustomCategory(1), CustomCategory(0)]);
        assert_eq!(rules.name(CustomCategory(1)), Some("embeddings"));
        assert_eq!(rules.name(CustomCategory::NONE), None);
        assert_eq!(rules.categories().map(|(_, name)| name).collect::<Vec<_>>(), ["attention", "embeddings"]);
        let stack = rules.rules()[0].expression(CustomField::Stack).unwrap();
        assert!(stack.is_match("/a/attention.py:12 forward") && !stack.is_match("/a/attention_py:12 forward"));
        assert!(rules.uses(CustomField::Tensor) && rules.rules()[0].expression(CustomField::Tensor).is_none());
    }

    #[test]
    fn an_error_has_the_line_and_the_reason() {
        assert_eq!(error(""), (1, "EOF while parsing a value".into()));
        assert_eq!(error("[]").0, 1);
        assert_eq!(error("{}"), (1, "the key categories is missing".into()));
        assert_eq!(error("{\"categories\": []}"), (1, "categories has no rule".into()));
        assert_eq!(error("{\n\"rules\": []}").1, "unknown key rules; the file has the key categories");
        let rule =
            |rule: &str| error(&format!("{{\"categories\": [\n{{\"name\": \"a\", \"stack\": \"x\"}},\n{rule}\n]}}"));
        let (line, reason) = rule("{\"name\": \"b\", \"stack\": \"(x\"}");
        assert_eq!((line, &*reason), (3, "invalid regular expression: found open group without closing ')'"));
        assert_eq!(
            rule("{\"name\": \"b\",\n\n\"stack\": \"x{1000}{1000}\"}"),
            (5, "invalid regular expression: compiled regex exceeded size limit".into())
        );
        assert_eq!(
            rule("{\"name\": \"b\", \"file\": \"x\"}").1,
            "unknown key file; a rule has name, stack, module, tensor and node"
        );
        assert_eq!(rule("{\"stack\": \"x\"}"), (3, "a rule has no name".into()));
        assert_eq!(
            rule("{\"name\": \"b\"}"),
            (3, "the rule b has no expression: add stack, module, tensor or node".into())
        );
        assert_eq!(
            rule("{\"name\": \"b\", \"node\": \"x\", \"node\": \"y\"}").1,
            "the key node occurs twice in one rule"
        );
        assert_eq!(rule("{\"name\": \"\", \"node\": \"x\"}").1, "a name has 1 to 64 characters on one line");
        assert_eq!(rule("{\"name\": \"none of the rules\", \"node\": \"x\"}").0, 3);
        assert_eq!(rule("{\"name\": 1, \"node\": \"x\"}").0, 3);
        let many = vec!["{\"name\": \"a\", \"node\": \"x\"}"; MAX_CUSTOM_RULES + 1].join(",\n");
        assert_eq!(error(&format!("{{\"categories\": [{many}]}}")).1, "more than 256 rules");
    }

    #[test]
    fn a_pattern_takes_linear_time() {
        let rules = CustomRules::parse(r#"{"categories": [{"name": "a", "stack": "(a+)+$"}]}"#).unwrap();
        let text = "a".repeat(16 << 10) + "!";
        assert!(!rules.rules()[0].expression(CustomField::Stack).unwrap().is_match(&text));
    }
}
