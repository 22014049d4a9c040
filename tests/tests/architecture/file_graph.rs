//! The graph of a crate's source files: which file uses items of which other file.
//!
//! A file uses another file if one of its paths names an item there. Paths count wherever they are: in `use`
//! declarations, expressions, types, patterns, attributes and the tokens of macros. These rules decide the rest:
//! - `mod child;` is no use. Neither are the modules that a path only passes through.
//! - A re-export (`pub use`) is an item of the file that re-exports. That file uses the file with the definition.
//! - An inline module belongs to its file.
//! - Code under `cfg(test)` does not count.
//! - A call of a method names no file, so it is invisible here.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::Visit;
use syn::{Attribute, ImplItem, Item, Meta, Token, TraitItem, UseTree, Visibility};

/// The files of one crate. Paths are relative to the repository.
pub(crate) struct FileGraph {
    /// Maps a file to the files that it uses. Each use has the paths that name it, with their lines.
    uses: BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>,
    /// Files that only tests use.
    test_files: BTreeSet<PathBuf>,
}

impl FileGraph {
    /// Reads the crate whose root module is `root_file`. All paths are relative to `repository`.
    pub(crate) fn read(repository: &Path, root_file: &Path) -> FileGraph {
        let mut tree = ModuleTree { repository, modules: Vec::new(), test_files: BTreeSet::new() };
        let folder = root_file.parent().unwrap();
        tree.add_file(None, "crate", root_file.to_owned(), folder.to_owned());
        for module in 0..tree.modules.len() {
            tree.read_names(module);
        }
        let mut uses: BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>> = BTreeMap::new();
        for (index, module) in tree.modules.iter().enumerate() {
            uses.entry(module.file.clone()).or_default();
            let mut references = References { found: Vec::new() };
            module.items.iter().for_each(|item| references.visit_item(item));
            for reference in references.found {
                for file in tree.files_of(index, &reference) {
                    let place = format!("{} (line {})", reference.path.join("::"), reference.line);
                    uses.entry(module.file.clone()).or_default().entry(file).or_default().insert(place);
                }
            }
        }
        FileGraph { uses, test_files: tree.test_files }
    }

    /// All files of the crate that are not for tests only.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.uses.keys().map(PathBuf::as_path)
    }

    /// The files that only tests use.
    pub(crate) fn test_files(&self) -> impl Iterator<Item = &Path> {
        self.test_files.iter().map(PathBuf::as_path)
    }

    /// The files that `file` uses, with the paths that name them.
    pub(crate) fn uses_of(&self, file: &Path) -> impl Iterator<Item = (&Path, &BTreeSet<String>)> {
        self.uses.get(file).into_iter().flatten().map(|(file, paths)| (file.as_path(), paths))
    }

    /// The circles: the largest sets of files in which every file uses every other one, directly or not.
    pub(crate) fn circles(&self) -> BTreeSet<BTreeSet<&Path>> {
        let reachable: BTreeMap<&Path, BTreeSet<&Path>> =
            self.files().map(|file| (file, self.reachable_from(file))).collect();
        let circle = |file: &&Path| -> BTreeSet<&Path> {
            let others = reachable[file].iter().filter(|other| reachable[*other].contains(file));
            others.copied().collect()
        };
        reachable.keys().map(circle).filter(|circle| circle.len() > 1).collect()
    }

    fn reachable_from<'a>(&'a self, file: &'a Path) -> BTreeSet<&'a Path> {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![file]);
        while let Some(file) = todo.pop() {
            if seen.insert(file) {
                todo.extend(self.uses_of(file).map(|(used, _)| used));
            }
        }
        seen
    }
}

/// A path of the source, or the macro `name!` as the path `name`.
struct Reference {
    path: Vec<String>,
    line: usize,
    kind: ReferenceKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ReferenceKind {
    /// A path that names an item or a module.
    Path,
    /// `path::*` in a `use` declaration.
    Glob,
    /// A macro call with a single name, which may be in scope by position in the source.
    MacroName,
}

/// All modules of a crate, the root first.
struct ModuleTree<'a> {
    repository: &'a Path,
    modules: Vec<Module>,
    test_files: BTreeSet<PathBuf>,
}

#[derive(Default)]
struct Module {
    parent: Option<usize>,
    file: PathBuf,
    items: Vec<Item>,
    children: HashMap<String, usize>,
    /// The names of all other items that are defined here, macros included.
    defined: HashSet<String>,
    macros: HashSet<String>,
    /// The names that `use` declarations bring in, with the path of each.
    imports: HashMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// The result of following a path.
enum Target {
    Module(usize),
    Item(usize),
}

/// The item that a name in a module stands for.
enum Binding {
    /// A child module.
    Child(usize),
    /// An item that is defined or imported here, or that comes from another crate.
    Item,
    /// A module that is imported here.
    ImportedModule(usize),
}

impl ModuleTree<'_> {
    /// Adds the module in `file`. The files of its child modules are in `child_folder`.
    fn add_file(&mut self, parent: Option<usize>, name: &str, file: PathBuf, child_folder: PathBuf) {
        let text = std::fs::read_to_string(self.repository.join(&file));
        let text = text.unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("cannot parse {}: {error}", file.display()));
        let folder = file.parent().unwrap().to_owned();
        self.add_module(parent, name, file, parsed.items, &child_folder, &folder);
    }

    /// Adds a module and its children. A `#[path]` attribute in it is relative to `path_folder`.
    fn add_module(
        &mut self,
        parent: Option<usize>,
        name: &str,
        file: PathBuf,
        items: Vec<Item>,
        child_folder: &Path,
        path_folder: &Path,
    ) {
        let index = self.modules.len();
        self.modules.push(Module { parent, file: file.clone(), ..Module::default() });
        if let Some(parent) = parent {
            self.modules[parent].children.insert(name.to_owned(), index);
        }
        for item in items {
            let Item::Mod(module) = item else {
                self.modules[index].items.push(item);
                continue;
            };
            let name = module.ident.to_string();
            if let Some((_, items)) = module.content {
                if !is_test_only(&module.attrs) {
                    let folder = child_folder.join(&name);
                    self.add_module(Some(index), &name, file.clone(), items, &folder, &folder);
                }
                continue;
            }
            let (child, folder) = self.child_file(&module.attrs, &name, child_folder, path_folder);
            if is_test_only(&module.attrs) {
                self.test_files.insert(child);
            } else {
                self.add_file(Some(index), &name, child, folder);
            }
        }
    }

    /// The file of `mod name;`, and the folder of that module's children.
    fn child_file(
        &self,
        attributes: &[Attribute],
        name: &str,
        child_folder: &Path,
        path_folder: &Path,
    ) -> (PathBuf, PathBuf) {
        let given = attributes.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
                _ => None,
            },
            _ => None,
        });
        if let Some(given) = given {
            let file = path_folder.join(given);
            let folder = file.parent().unwrap().to_owned();
            return (file, folder);
        }
        let file = child_folder.join(format!("{name}.rs"));
        let folder = child_folder.join(name);
        let exists = self.repository.join(&file).exists();
        (if exists { file } else { folder.join("mod.rs") }, folder)
    }

    /// Collects the names that a module defines and imports.
    fn read_names(&mut self, index: usize) {
        let items = std::mem::take(&mut self.modules[index].items);
        let mut names = Names { module: &mut self.modules[index] };
        items.iter().filter(|item| !is_test_only(attributes_of(item))).for_each(|item| names.define(item));
        // The module's own imports first: a function may import another item by the same name.
        let (imports, others): (Vec<&Item>, Vec<&Item>) = items.iter().partition(|item| matches!(item, Item::Use(_)));
        imports.into_iter().chain(others).for_each(|item| names.visit_item(item));
        self.modules[index].items = items;
    }

    /// The files, other than the module's own, with the items that a reference names.
    fn files_of(&self, module: usize, reference: &Reference) -> BTreeSet<PathBuf> {
        let mut used = BTreeSet::new();
        if reference.kind == ReferenceKind::MacroName {
            used.extend(self.module_of_macro(module, &reference.path[0]));
        } else {
            match self.follow(module, &reference.path, &mut used, &mut HashSet::new()) {
                Some(Target::Module(target)) if reference.kind == ReferenceKind::Glob => {
                    used.insert(target);
                }
                Some(Target::Item(target)) => {
                    used.insert(target);
                }
                Some(Target::Module(_)) | None => {}
            }
        }
        let files = used.into_iter().map(|used| self.modules[used].file.clone());
        files.filter(|file| *file != self.modules[module].file).collect()
    }

    /// The ancestor that defines a macro which is in scope without an import.
    fn module_of_macro(&self, module: usize, name: &str) -> Option<usize> {
        if self.modules[module].imports.contains_key(name) {
            return None;
        }
        let mut at = Some(module);
        while let Some(index) = at {
            if self.modules[index].macros.contains(name) {
                return Some(index);
            }
            at = self.modules[index].parent;
        }
        None
    }

    /// Follows a path from a module to its item or module, through re-exports of modules. Adds the modules whose
    /// re-exports it uses to `used`. `None` if the path leads into another crate.
    fn follow(
        &self,
        from: usize,
        path: &[String],
        used: &mut BTreeSet<usize>,
        visiting: &mut HashSet<(usize, String)>,
    ) -> Option<Target> {
        let mut rest = path;
        let mut at = from;
        match path.first()?.as_str() {
            "crate" => (at, rest) = (0, &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    (at, rest) = (self.modules[at].parent?, &rest[1..]);
                }
            }
            "Self" => return None,
            first => match self.binding(from, first, visiting)? {
                Binding::Child(module) | Binding::ImportedModule(module) => (at, rest) = (module, &path[1..]),
                Binding::Item => return Some(Target::Item(from)),
            },
        }
        for name in rest {
            match self.binding(at, name, visiting) {
                Some(Binding::Child(module)) => at = module,
                Some(Binding::ImportedModule(module)) => {
                    used.insert(at);
                    at = module;
                }
                // A name that is not found comes from a macro or from a glob import.
                Some(Binding::Item) | None => return Some(Target::Item(at)),
            }
        }
        Some(Target::Module(at))
    }

    /// The item that `name` stands for in a module. `None` if the module has no such name. `visiting` ends the search
    /// in imports that refer to each other.
    fn binding(&self, index: usize, name: &str, visiting: &mut HashSet<(usize, String)>) -> Option<Binding> {
        let module = &self.modules[index];
        if let Some(child) = module.children.get(name) {
            return Some(Binding::Child(*child));
        }
        if module.defined.contains(name) {
            return Some(Binding::Item);
        }
        if !visiting.insert((index, name.to_owned())) {
            return None;
        }
        let found = if let Some(path) = module.imports.get(name) {
            Some(match self.follow(index, path, &mut BTreeSet::new(), visiting) {
                Some(Target::Module(module)) => Binding::ImportedModule(module),
                Some(Target::Item(_)) | None => Binding::Item,
            })
        } else {
            module.globs.iter().find_map(|path| match self.follow(index, path, &mut BTreeSet::new(), visiting) {
                Some(Target::Module(target)) => match self.binding(target, name, visiting)? {
                    Binding::Child(module) | Binding::ImportedModule(module) => Some(Binding::ImportedModule(module)),
                    Binding::Item => Some(Binding::Item),
                },
                Some(Target::Item(_)) | None => None,
            })
        };
        visiting.remove(&(index, name.to_owned()));
        found
    }
}

/// Collects the names of a module.
struct Names<'a> {
    module: &'a mut Module,
}

impl Names<'_> {
    fn define(&mut self, item: &Item) {
        let name = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::TraitAlias(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Macro(syn::ItemMacro { ident: Some(ident), .. }) => {
                self.module.macros.insert(ident.to_string());
                ident
            }
            Item::ForeignMod(item) => {
                let names = item.items.iter().filter_map(|item| match item {
                    syn::ForeignItem::Fn(item) => Some(&item.sig.ident),
                    syn::ForeignItem::Static(item) => Some(&item.ident),
                    syn::ForeignItem::Type(item) => Some(&item.ident),
                    _ => None,
                });
                self.module.defined.extend(names.map(ToString::to_string));
                return;
            }
            _ => return,
        };
        self.module.defined.insert(name.to_string());
    }
}

/// The imports of functions count as imports of their module.
impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test_only(attributes_of(item)) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for leaf in leaves(&item.tree) {
            match leaf.name {
                None => self.module.globs.push(leaf.path),
                Some(name) => {
                    self.module.imports.entry(name).or_insert(leaf.path);
                }
            }
        }
    }
}

/// Collects the paths in the code of a module.
struct References {
    found: Vec<Reference>,
}

impl References {
    fn add(&mut self, path: Vec<String>, line: usize, kind: ReferenceKind) {
        self.found.push(Reference { path, line, kind });
    }

    fn add_use(&mut self, tree: &UseTree) {
        for leaf in leaves(tree) {
            let kind = if leaf.name.is_none() { ReferenceKind::Glob } else { ReferenceKind::Path };
            self.add(leaf.path, leaf.line, kind);
        }
    }

    /// Collects the paths in the tokens of a macro, `depth` inline modules below the module.
    fn add_tokens(&mut self, tokens: TokenStream, depth: usize) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += match token {
                TokenTree::Group(group) => {
                    self.add_tokens(group.stream(), depth);
                    1
                }
                TokenTree::Ident(ident) => {
                    let before = |distance: usize, character: char| {
                        at.checked_sub(distance).is_some_and(|at| is_punctuation(&tokens[at], character))
                    };
                    // A macro's parameter, or the rest of a path that begins with `::` or with generic arguments.
                    let is_other = before(1, '$') && ident != "crate" || before(1, ':') && before(2, ':');
                    if is_other { 1 } else { self.add_tokens_at(&tokens[at..], depth) }
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => 1,
            };
        }
    }

    /// Collects the path that begins with the identifier `tokens[0]`. Returns how many tokens it has read.
    fn add_tokens_at(&mut self, tokens: &[TokenTree], depth: usize) -> usize {
        let line = tokens[0].span().start().line;
        match (tokens[0].to_string().as_str(), tokens.get(1), tokens.get(2)) {
            // A visibility.
            ("pub", Some(TokenTree::Group(group)), _) if group.delimiter() == Delimiter::Parenthesis => {
                let first = group.stream().into_iter().next().map(|token| token.to_string());
                let is_restriction = first.is_some_and(|first| ["in", "super", "crate", "self"].contains(&&*first));
                return if is_restriction { 2 } else { 1 };
            }
            // An inline module. Its name may be a parameter of the macro: `mod $name { ... }`.
            ("mod", Some(TokenTree::Ident(_)), Some(TokenTree::Group(group))) => {
                self.add_tokens(group.stream(), depth + 1);
                return 3;
            }
            ("mod", Some(dollar), Some(TokenTree::Ident(_))) if is_punctuation(dollar, '$') => {
                if let Some(TokenTree::Group(group)) = tokens.get(3) {
                    self.add_tokens(group.stream(), depth + 1);
                    return 4;
                }
            }
            ("use", ..) => {
                let end = tokens.iter().position(|token| is_punctuation(token, ';'));
                let tree = end.and_then(|end| syn::parse2::<UseTree>(tokens[1..end].iter().cloned().collect()).ok());
                if let Some((end, tree)) = end.zip(tree) {
                    for leaf in leaves(&tree) {
                        let kind = if leaf.name.is_none() { ReferenceKind::Glob } else { ReferenceKind::Path };
                        self.add_at_depth(leaf.path, leaf.line, kind, depth);
                    }
                    return end + 1;
                }
            }
            _ => {}
        }
        let mut path = vec![tokens[0].to_string()];
        let mut read = 1;
        while let [colon, other, next, ..] = &tokens[read..]
            && is_punctuation(colon, ':')
            && is_punctuation(other, ':')
        {
            match next {
                TokenTree::Ident(ident) => path.push(ident.to_string()),
                // `module::$name`: some item of the module.
                TokenTree::Punct(punctuation) if punctuation.as_char() == '$' => path.push("$".to_owned()),
                _ => break,
            }
            read += 3;
        }
        if path.len() > 1 {
            self.add_at_depth(path, line, ReferenceKind::Path, depth);
        } else if tokens.get(1).is_some_and(|next| is_punctuation(next, '!')) {
            self.add(path, line, ReferenceKind::MacroName);
        }
        read
    }

    /// Adds a path that is written `depth` inline modules below the module.
    fn add_at_depth(&mut self, mut path: Vec<String>, line: usize, kind: ReferenceKind, depth: usize) {
        let supers = path.iter().take_while(|name| *name == "super").count();
        if depth > 0 && supers > 0 {
            if supers < depth {
                return;
            }
            path.drain(..depth);
            if supers == depth {
                path.insert(0, "self".to_owned());
            }
        }
        self.add(path, line, kind);
    }
}

impl<'ast> Visit<'ast> for References {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test_only(attributes_of(item)) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Const(item) => &*item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            ImplItem::Macro(item) => &item.attrs,
            _ => &[],
        };
        if !is_test_only(attributes) {
            syn::visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        let attributes = match item {
            TraitItem::Const(item) => &*item.attrs,
            TraitItem::Fn(item) => &item.attrs,
            TraitItem::Type(item) => &item.attrs,
            TraitItem::Macro(item) => &item.attrs,
            _ => &[],
        };
        if !is_test_only(attributes) {
            syn::visit::visit_trait_item(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_test_only(&local.attrs) {
            syn::visit::visit_local(self, local);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_test_only(&field.attrs) {
            syn::visit::visit_field(self, field);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use(&item.tree);
    }

    /// `pub(in crate::module)` uses nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta
            && !list.path.is_ident("cfg")
        {
            self.add_tokens(list.tokens.clone(), 0);
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if let Some(name) = call.path.get_ident() {
            self.add(vec![name.to_string()], name.span().start().line, ReferenceKind::MacroName);
        }
        self.visit_path(&call.path);
        self.add_tokens(call.tokens.clone(), 0);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let line = path.segments[0].ident.span().start().line;
            self.add(path.segments.iter().map(|s| s.ident.to_string()).collect(), line, ReferenceKind::Path);
        }
        // The paths in generic arguments.
        syn::visit::visit_path(self, path);
    }
}

/// One name of a `use` declaration.
struct Leaf {
    path: Vec<String>,
    /// The name in this module. `None` for `*`.
    name: Option<String>,
    line: usize,
}

fn leaves(tree: &UseTree) -> Vec<Leaf> {
    fn add(tree: &UseTree, before: &[String], found: &mut Vec<Leaf>) {
        let joined = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(tree) => add(&tree.tree, &joined(&tree.ident), found),
            UseTree::Group(tree) => tree.items.iter().for_each(|tree| add(tree, before, found)),
            UseTree::Glob(tree) => {
                let line = tree.star_token.spans[0].start().line;
                found.push(Leaf { path: before.to_vec(), name: None, line });
            }
            UseTree::Name(syn::UseName { ident }) | UseTree::Rename(syn::UseRename { ident, .. }) => {
                // `module::{self}` names the module.
                let path = if ident == "self" && !before.is_empty() { before.to_vec() } else { joined(ident) };
                let name = match tree {
                    UseTree::Rename(tree) => tree.rename.to_string(),
                    _ => path.last().cloned().unwrap_or_default(),
                };
                found.push(Leaf { path, name: Some(name), line: ident.span().start().line });
            }
        }
    }
    let mut found = Vec::new();
    add(tree, &[], &mut found);
    found
}

fn is_punctuation(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punctuation) if punctuation.as_char() == character)
}

/// Whether the attributes keep code out of all builds but tests.
fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<Meta>().is_ok_and(|predicate| !outcomes_without_test(&predicate).can_be_true)
    })
}

/// The possible values of a `cfg` predicate in a build without tests.
struct Outcomes {
    can_be_true: bool,
    can_be_false: bool,
}

fn outcomes_without_test(predicate: &Meta) -> Outcomes {
    let unknown = Outcomes { can_be_true: true, can_be_false: true };
    let list = match predicate {
        Meta::Path(path) if path.is_ident("test") => return Outcomes { can_be_true: false, can_be_false: true },
        Meta::List(list) => list,
        Meta::Path(_) | Meta::NameValue(_) => return unknown,
    };
    let Ok(inner) = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated) else { return unknown };
    let inner: Vec<Outcomes> = inner.iter().map(outcomes_without_test).collect();
    if list.path.is_ident("all") {
        Outcomes {
            can_be_true: inner.iter().all(|o| o.can_be_true),
            can_be_false: inner.iter().any(|o| o.can_be_false),
        }
    } else if list.path.is_ident("any") {
        Outcomes {
            can_be_true: inner.iter().any(|o| o.can_be_true),
            can_be_false: inner.iter().all(|o| o.can_be_false),
        }
    } else if let ([only], true) = (&*inner, list.path.is_ident("not")) {
        Outcomes { can_be_true: only.can_be_false, can_be_false: only.can_be_true }
    } else {
        unknown
    }
}

fn attributes_of(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
