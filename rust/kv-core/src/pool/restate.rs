//! The events that state all cached blocks, for a reader that has lost events.

use std::collections::HashMap;

use super::Pool;
use crate::events::Event;
use crate::ids::NodeId;

impl Pool {
    /// Appends `Stored` events of all cached blocks, parents before their children.
    pub(super) fn append_cached(&mut self, events: &mut Vec<Event>) {
        let ready = self.ready();
        let runs =
            ready.chunk_by(|last, next| last.node == next.node && last.offset + 1 == next.offset);
        let mut depths = HashMap::new();
        let mut runs: Vec<_> = runs
            .map(|run| {
                let end = run[run.len() - 1];
                (self.depth(end.node, &mut depths), end, run.len())
            })
            .collect();
        runs.sort_by_key(|&(depth, ..)| depth); // stable: a node's blocks stay in order
        for (_, end, count) in runs {
            self.tree.append_stored(end, count, events);
        }
    }

    /// The depth of a node. `known` caches depths.
    fn depth(&self, node: NodeId, known: &mut HashMap<NodeId, usize>) -> usize {
        let (mut path, mut at) = (Vec::new(), Some(node));
        let mut depth = loop {
            match at {
                None => break 0,
                Some(node) => match known.get(&node) {
                    Some(depth) => break depth + 1,
                    None => path.push(node),
                },
            }
            at = self
                .tree
                .parent_of(path[path.len() - 1])
                .map(|parent| parent.node);
        };
        for node in path.into_iter().rev() {
            known.insert(node, depth);
            depth += 1;
        }
        depth - 1
    }
}
