//! Modules import each other in one direction.

use crate::levels::Tests;
use module_graph::Graph;

fn imports_have_no_circles() {
    let mut graph = Graph::of_crate(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(graph.circle(), None);
    let (modules, imports) = graph.size();
    assert!(
        modules > 20 && imports > 70,
        "{modules} modules, {imports} imports"
    );
    assert!(graph.imports("attention", "dispatch") && graph.imports("amx", "kernel"));
    graph.add("error", "attention");
    assert!(graph.circle().is_some());
}

/// Adds the tests of this module.
pub(crate) fn add(tests: &mut Tests) {
    once!(tests, imports_have_no_circles);
}
