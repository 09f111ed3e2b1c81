//! Modules import each other in one direction.

use module_graph::Graph;

#[test]
fn imports_have_no_circles() {
    let mut graph = Graph::of_crate(env!("CARGO_MANIFEST_DIR"));
    assert_eq!(graph.circle(), None);
    let (modules, imports) = graph.size();
    assert!(
        modules > 35 && imports > 130,
        "{modules} modules, {imports} imports"
    );
    assert!(graph.imports("manager", "state") && graph.imports("state", "pool"));
    assert!(graph.imports("pool", "radix") && graph.imports("pool::check", "pool"));
    assert!(graph.imports("state", "step::steps") && graph.imports("step::commit", "step::plan"));
    graph.add("ids", "manager");
    assert!(graph.circle().is_some());
}
