//! In every crate of the workspace, modules import each other in one direction.

use std::fs;
use std::path::Path;

use module_graph::Graph;

#[test]
fn imports_have_no_circles() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut modules, mut imports) = (0, 0);
    for entry in fs::read_dir(crates).expect("a folder") {
        let folder = entry.expect("an entry").path();
        if folder.join("src/lib.rs").is_file() {
            let graph = Graph::of_crate(&folder);
            assert_eq!(graph.circle(), None, "{}", folder.display());
            modules += graph.size().0;
            imports += graph.size().1;
        }
    }
    assert!(modules > 180 && imports > 500, "{modules}, {imports}");
}

/// Imports that are there are seen, and close a circle with one in the other direction.
#[test]
fn a_circle_would_be_found() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (name, module, other) in [
        ("cpu-kernels", "attention", "dispatch"),
        ("cpu-py", "attention", "rotation"),
        ("kv-core", "manager", "ids"),
        ("kv-core", "state", "step::steps"),
        ("kv-core", "step::commit", "step::plan"),
        ("kv-py", "sequence", "tokens"),
        ("kv-store", "store", "state"),
        ("suffix-index", "suffix_index", "token_log"),
    ] {
        let mut graph = Graph::of_crate(crates.join(name));
        assert!(graph.imports(module, other), "{name}: {module}, {other}");
        graph.add(other, module);
        assert!(graph.circle().is_some(), "{name}");
    }
}
