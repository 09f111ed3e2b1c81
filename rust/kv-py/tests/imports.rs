//! Modules import each other in one direction.

use module_graph::Graph;

#[test]
fn imports_have_no_circles() {
    let mut graph = Graph::of_crate(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(graph.circle(), None);
    let (modules, imports) = graph.size();
    assert!(
        modules > 25 && imports > 80,
        "{modules} modules, {imports} imports"
    );
    assert!(graph.imports("kv_blocks", "memory") && graph.imports("plan", "batch"));
    graph.add("tokens", "sequence");
    assert!(graph.circle().is_some());
}
