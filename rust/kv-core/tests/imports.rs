//! Imports go one way inside the crate: no two files import each other, directly or over others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The files that each file imports, by the paths of their modules. Tests and documentation do not count,
/// nor what a module publishes of its own parts.
fn imports(folder: &Path, module: &str, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let stem = stem.expect("a name").to_owned();
        let name = match (module, stem.as_str()) {
            ("", "lib") => continue,
            ("", _) => stem,
            (_, "mod") => module.to_owned(),
            _ => format!("{module}::{stem}"),
        };
        if path.is_dir() {
            imports(&path, &name, found);
        } else {
            let text = fs::read_to_string(&path).expect("text");
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            found.insert(name, text.to_owned());
        }
    }
}

fn graph() -> BTreeMap<String, BTreeSet<String>> {
    let mut texts = BTreeMap::new();
    imports(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        "",
        &mut texts,
    );
    let longest_module = |path: &str| {
        let mut path = path.to_owned();
        while !texts.contains_key(&path) {
            path.truncate(path.rfind("::")?);
        }
        Some(path)
    };
    let edges = texts.iter().map(|(name, text)| {
        let code = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        let uses = code.flat_map(|line| line.split("crate::").skip(1));
        let path = |rest: &str| {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
            longest_module(rest[..end.unwrap_or(rest.len())].trim_end_matches(':'))
        };
        let uses = uses.filter_map(path).filter(|used| used != name);
        (name.clone(), uses.collect())
    });
    edges.collect()
}

/// A way from `at` back to `goal`.
fn circle(
    graph: &BTreeMap<String, BTreeSet<String>>,
    at: &str,
    goal: &str,
    seen: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    for next in graph.get(at)? {
        if next == goal {
            return Some(vec![at.to_owned(), goal.to_owned()]);
        }
        if seen.insert(next.clone())
            && let Some(mut way) = circle(graph, next, goal, seen)
        {
            way.insert(0, at.to_owned());
            return Some(way);
        }
    }
    None
}

#[test]
fn imports_go_one_way() {
    let graph = graph();
    // A test that has seen nothing has shown nothing.
    let edges: usize = graph.values().map(BTreeSet::len).sum();
    assert!(
        graph.len() > 25 && edges > 80,
        "{} files, {edges} imports",
        graph.len()
    );
    assert!(graph["manager"].contains("state") && graph["state"].contains("pool"));
    assert!(graph["pool"].contains("contents") && graph["step::commit"].contains("contents"));
    for name in graph.keys() {
        let way = circle(&graph, name, name, &mut BTreeSet::new());
        assert_eq!(way, None, "{name} imports itself over others");
    }
}

#[test]
fn a_circle_is_seen() {
    let mut graph = graph();
    graph
        .entry("ids".into())
        .or_default()
        .insert("manager".into());
    let way = circle(&graph, "ids", "ids", &mut BTreeSet::new());
    assert!(way.is_some_and(|way| way.len() > 2));
}
