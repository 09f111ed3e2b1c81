//! The import graph of a crate's modules, for the test that it has no circles.
//!
//! An import is any path that begins with `crate`, `super`, `self` or a submodule, in `use` lists and macros too. A name
//! that `lib.rs` re-exports counts as an import of the module that it comes from; a name that `lib.rs` defines, as an
//! import of `lib`, which imports all that it uses. Comments, documentation and test modules do not count; `use super::`
//! is taken for one in a module within the file where it is indented.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The root module.
const ROOT: &str = "lib";

/// The modules that each module imports.
#[derive(Debug, Default)]
pub struct Graph(BTreeMap<String, BTreeSet<String>>);

impl Graph {
    /// The graph of the crate in `folder`, which has a `src/lib.rs`.
    ///
    /// # Panics
    ///
    /// Files that cannot be read.
    pub fn of_crate(folder: impl AsRef<Path>) -> Self {
        let mut texts = BTreeMap::new();
        read(&folder.as_ref().join("src"), "", &mut texts);
        Self::of_modules(&texts)
    }

    fn of_modules(texts: &BTreeMap<String, String>) -> Self {
        let reexports = reexports(&texts[ROOT]);
        let edges = texts.iter().map(|(module, text)| {
            let targets = paths(text, module).into_iter();
            let targets = targets.filter_map(|path| target(&path, module, texts, &reexports));
            (
                module.clone(),
                targets.filter(|target| target != module).collect(),
            )
        });
        Self(edges.collect())
    }

    /// The number of modules and of imports.
    pub fn size(&self) -> (usize, usize) {
        (self.0.len(), self.0.values().map(BTreeSet::len).sum())
    }

    /// Whether `module` imports `other`.
    pub fn imports(&self, module: &str, other: &str) -> bool {
        self.0.get(module).is_some_and(|all| all.contains(other))
    }

    /// Adds an import, to see that a circle would be found.
    pub fn add(&mut self, module: &str, other: &str) {
        let imported = self.0.entry(module.to_owned()).or_default();
        imported.insert(other.to_owned());
    }

    /// Modules of which each imports the next one and the last one the first.
    pub fn circle(&self) -> Option<Vec<String>> {
        let from = |module: &String| self.way(module, module, &mut BTreeSet::new());
        self.0.keys().find_map(from)
    }

    /// The modules from `module` to one that imports `goal`.
    fn way(&self, module: &str, goal: &str, seen: &mut BTreeSet<String>) -> Option<Vec<String>> {
        for next in self.0.get(module)? {
            if next == goal {
                return Some(vec![module.to_owned()]);
            }
            if seen.insert(next.clone())
                && let Some(mut way) = self.way(next, goal, seen)
            {
                way.insert(0, module.to_owned());
                return Some(way);
            }
        }
        None
    }
}

/// The code of every module below `folder`, by its path.
fn read(folder: &Path, parent: &str, texts: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let stem = stem.expect("a name").to_owned();
        let module = match (parent, stem.as_str()) {
            ("", _) => stem,
            (_, "mod") => parent.to_owned(),
            _ => format!("{parent}::{stem}"),
        };
        if path.is_dir() {
            read(&path, &module, texts);
        } else {
            texts.insert(module, code(&fs::read_to_string(&path).expect("text")));
        }
    }
}

/// A file without comments and without what follows `#[cfg(test)]` before a module with a body.
fn code(text: &str) -> String {
    let mut tests = text.match_indices("#[cfg(test)]").map(|(at, _)| at);
    let has_body = |at: &usize| {
        let after = text[*at..].lines().skip(1);
        let mut items = after.skip_while(|line| line.starts_with("#["));
        items
            .next()
            .is_some_and(|item| item.starts_with("mod ") && item.ends_with('{'))
    };
    let end = tests.find(has_body).unwrap_or(text.len());
    let lines = text[..end].lines();
    let lines = lines.map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The names that `lib.rs` re-exports, and the module of each.
fn reexports(root: &str) -> BTreeMap<String, String> {
    let statements = root.split("pub use ").skip(1);
    let statements = statements.filter_map(|rest| rest.split(';').next());
    let names = statements.flat_map(expand).filter_map(|item| {
        let (path, alias) = item.split_once(" as ").unwrap_or((&item, ""));
        let (module, name) = path.rsplit_once("::")?;
        let name = if alias.is_empty() { name } else { alias };
        Some((
            name.to_owned(),
            module.trim_start_matches("crate::").to_owned(),
        ))
    });
    names.collect()
}

/// Every path of a module's code that begins in this crate, from the root on.
fn paths(text: &str, module: &str) -> Vec<String> {
    let declared = text.lines().filter_map(|line| {
        let (_, name) = line.split_once("mod ")?;
        name.trim().strip_suffix(';')
    });
    let starts = declared.chain(["crate", "super", "self"]);
    let mut paths = vec![];
    for start in starts.map(|start| format!("{start}::")) {
        for (at, _) in text.match_indices(&start) {
            // Not in the middle of a name or a path.
            if !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                for path in expand(until_end(&text[at..])) {
                    let path = path.split(" as ").next().unwrap_or_default();
                    let path = match text[..at].ends_with(" use ") {
                        // Indented: in a module of this file, whose parent is the file's.
                        true => path.strip_prefix("super::").unwrap_or(path),
                        false => path,
                    };
                    paths.push(from_root(path, module));
                }
            }
        }
    }
    paths
}

/// A path, with its list if it ends with one.
fn until_end(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' if text[..at].ends_with("::") || depth > 0 => depth += 1,
            '}' if depth > 1 => depth -= 1,
            '}' if depth == 1 => return &text[..=at],
            _ if depth > 0 || c.is_alphanumeric() || c == '_' || c == ':' => {}
            _ => return &text[..at],
        }
    }
    text
}

/// `a::{b, c::{d as e}}` as `a::b`, `a::c::d as e`.
fn expand(path: &str) -> Vec<String> {
    let Some((start, list)) = path.split_once('{') else {
        return vec![path.trim().trim_end_matches("::self").to_owned()];
    };
    let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
    let (mut depth, mut begin, mut expanded) = (0, 0, vec![]);
    for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = list[begin..at].trim();
                if !item.is_empty() {
                    expanded.extend(
                        expand(item)
                            .iter()
                            .map(|rest| format!("{}{rest}", start.trim_start())),
                    );
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
    expanded
}

/// A path in `module` that begins with `crate`, `super`, `self` or a submodule, from the root on.
fn from_root(path: &str, module: &str) -> String {
    if let Some(rest) = path.strip_prefix("crate::") {
        return rest.to_owned();
    }
    let mut here: Vec<&str> = module.split("::").filter(|name| *name != ROOT).collect();
    let mut rest = path;
    loop {
        if let Some(after) = rest.strip_prefix("super::") {
            (rest, _) = (after, here.pop());
        } else if let Some(after) = rest.strip_prefix("self::") {
            rest = after;
        } else {
            here.push(rest);
            return here.join("::");
        }
    }
}

/// The module that a path from the root leads to.
fn target(
    path: &str,
    module: &str,
    texts: &BTreeMap<String, String>,
    reexports: &BTreeMap<String, String>,
) -> Option<String> {
    let name = path.split("::").next().unwrap_or_default();
    let path = match reexports.get(name) {
        Some(origin) => origin.clone(),
        None => path.to_owned(),
    };
    let mut longest = path.as_str();
    loop {
        if longest != ROOT && texts.contains_key(longest) {
            return Some(longest.to_owned());
        }
        match longest.rfind("::") {
            Some(end) => longest = &longest[..end],
            // Neither a module nor re-exported: defined in lib.rs, or of another crate.
            None => return (module != ROOT).then(|| ROOT.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(modules: &[(&str, &str)]) -> Graph {
        let texts = modules
            .iter()
            .map(|(name, text)| ((*name).to_owned(), code(text)));
        Graph::of_modules(&texts.collect())
    }

    #[test]
    fn every_kind_of_path_counts() {
        let graph = graph(&[
            (
                "lib",
                "mod a;\nmod b;\nuse std::fmt;\npub use a::{Name, other::Other as It};\nuse b::local;\nfn own() {}",
            ),
            ("a", "use crate::{b, c::{self, d::Deep}};"),
            ("a::other", "use super::super::c;\nuse super::Name;"),
            ("b", "fn f() { crate::c::g(); }"),
            ("c", "mod d;\nuse crate::It;\nuse d::Deep;"),
            ("c::d", "use self::x;"),
            ("e", "macro_rules! m { () => { $crate::b::f() } }"),
            (
                "f",
                "// crate::a\n/// [`crate::b`]\n#[cfg(test)]\nmod tests {\n use crate::c; }",
            ),
            ("g", "use crate::own;"),
            (
                "i",
                "mod x {\n    use super::y;\n    use super::super::b;\n}",
            ),
            ("h", "#[cfg(test)]\nuse std::fmt;\nuse crate::a;"),
        ]);
        for (module, others) in [
            ("lib", vec!["a", "a::other", "b"]),
            ("a", vec!["b", "c", "c::d"]),
            ("a::other", vec!["a", "c"]),
            ("b", vec!["c"]),
            ("c", vec!["a::other", "c::d"]),
            ("c::d", vec![]),
            ("e", vec!["b"]),
            ("f", vec![]),
            ("g", vec!["lib"]),
            ("i", vec!["b"]),
            ("h", vec!["a"]),
        ] {
            let imports: Vec<_> = graph.0[module].iter().map(String::as_str).collect();
            assert_eq!(imports, others, "{module}");
        }
    }

    #[test]
    fn circles_are_found() {
        let mut modules = vec![
            (
                "lib",
                "mod a;\nmod b;\nmod c;\npub use a::A;\nfn own() { c::f() }",
            ),
            ("a", "use crate::b::B;"),
            ("b", ""),
            ("c", ""),
        ];
        assert_eq!(graph(&modules).circle(), None);
        modules[2].1 = "use crate::A;";
        assert_eq!(graph(&modules).circle(), Some(vec!["a".into(), "b".into()]));
        modules[2].1 = "";
        modules[3].1 = "use crate::own;";
        assert_eq!(
            graph(&modules).circle(),
            Some(vec!["c".into(), "lib".into()])
        );
    }
}
