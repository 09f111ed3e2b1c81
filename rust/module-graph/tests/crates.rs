//! In every crate of the workspace, modules import each other in one direction.

use std::fs;
use std::path::Path;

use module_graph::Graph;

#[test]
fn imports_have_no_circles() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let crates = crates.expect("the folder of all crates");
    let (mut modules, mut imports) = (0, 0);
    for entry in fs::read_dir(crates).expect("a folder") {
        let folder = entry.expect("an entry").path();
        if folder.join("src/lib.rs").is_file() {
            let graph = Graph::of_crate(&folder);
            assert_eq!(graph.circle(), None, "{}", folder.display());
            let size = graph.size();
            (modules, imports) = (modules + size.0, imports + size.1);
        }
    }
    println!("{modules} modules, {imports} imports");
    assert!(modules > 180 && imports > 500);
}

/// Imports that are there are seen, and close a circle with one in the other direction.
#[test]
fn a_circle_would_be_found() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (name, module, other) in [
        ("cpu-kernels", "attention", "dispatch"),
        ("cpu-py", "attention", "rotation"),
        ("kv-core", "manager", "ids"),
        ("kv-core", "pool::check", "pool"),
        ("kv-core", "state", "step::steps"),
        ("kv-core", "step::commit", "step::plan"),
        ("kv-py", "sequence", "tokens"),
        ("kv-router", "replica_index", "hash_table"),
        ("kv-store", "store", "state"),
        ("suffix-index", "suffix_index", "token_log"),
    ] {
        let mut graph = Graph::of_crate(crates.join(name));
        assert!(graph.imports(module, other), "{name}: {module}, {other}");
        graph.add(other, module);
        assert!(graph.circle().is_some(), "{name}");
    }
}
