//! Modules import each other in one direction.

use module_graph::Graph;

#[test]
fn imports_have_no_circles() {
    let mut graph = Graph::of_crate(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(graph.circle(), None);
    assert_eq!(graph.size(), (3, 3));
    graph.add("token_log", "suffix_index");
    assert!(graph.circle().is_some());
}
