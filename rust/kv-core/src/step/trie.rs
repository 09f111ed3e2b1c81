//! Rows of a batch in the order in which their ways through the contents part: O(rows and the runs on
//! their ways), however long these are.

use crate::contents::{Contents, Spot};
use crate::ids::RunId;

/// The ways of a batch's rows through the contents, as far as they are one.
#[derive(Debug, Default)]
pub(super) struct Trie {
    /// Runs on a way, each after the one that it hangs behind. The first stands for all namespaces.
    nodes: Vec<Node>,
    /// By run: its node, if the number is that of this trie.
    known: Vec<(u32, u32)>,
    number: u32,
    /// What leaves a node: behind how many leading blocks, and who.
    leaves: Vec<Leaf>,
    /// The same, node by node.
    sorted: Vec<Leaf>,
    /// Runs that are new, on the way down.
    way: Vec<(RunId, u32)>,
    /// Scratch.
    pub(super) numbers: Vec<u32>,
}

#[derive(Debug)]
struct Node {
    parent: u32,
    /// Rows that go through it.
    rows: u32,
    leaves: u32,
    /// Where its rows begin in the order.
    place: u32,
}

#[derive(Clone, Copy, Debug)]
struct Leaf {
    node: u32,
    depth: u32,
    what: Leaves,
}

#[derive(Clone, Copy, Debug)]
enum Leaves {
    Row(u32),
    Node(u32),
}

impl Trie {
    pub(super) fn begin(&mut self, rows: usize) {
        self.number = self.number.wrapping_add(1);
        if self.number == 0 {
            self.known.clear(); // the numbers begin again
            self.number = 1;
        }
        self.nodes.clear();
        self.leaves.clear();
        self.nodes.reserve(2 * rows);
        self.leaves.reserve(2 * rows);
        self.add(0);
    }

    fn add(&mut self, parent: u32) -> u32 {
        self.nodes.push(Node {
            parent,
            rows: 0,
            leaves: 0,
            place: 0,
        });
        self.nodes.len() as u32 - 1
    }

    fn leave(&mut self, node: u32, depth: u32, what: Leaves) {
        self.nodes[node as usize].leaves += 1;
        self.leaves.push(Leaf { node, depth, what });
    }

    /// A row more, whose way of `depth` blocks ends at `spot`.
    #[inline]
    pub(super) fn insert(&mut self, contents: &Contents, (spot, depth): (Spot, usize), row: u32) {
        // Climbs to a run that is known, or to the namespace.
        let (mut run, mut begins) = (spot.run, depth as u32 - spot.rows);
        let mut node = loop {
            match self.known.get(run.at()) {
                Some(&(number, node)) if number == self.number => break node,
                _ => self.way.push((run, begins)),
            }
            let Some(parent) = contents.hangs_behind(run) else {
                break 0;
            };
            begins -= parent.rows;
            run = parent.run;
        };
        while let Some((run, begins)) = self.way.pop() {
            let child = self.add(node);
            self.leave(node, begins, Leaves::Node(child));
            if run.at() >= self.known.len() {
                self.known.resize(run.at() + 1, (0, 0));
            }
            self.known[run.at()] = (self.number, child);
            node = child;
        }
        self.leave(node, depth as u32, Leaves::Row(row));
        self.nodes[node as usize].rows += 1;
    }

    /// The rows in the order in which they leave, and how many leading blocks each has in common with the
    /// one before.
    pub(super) fn walk(&mut self, order: &mut Vec<u32>, common: &mut Vec<u32>) {
        for node in (1..self.nodes.len()).rev() {
            let Node { parent, rows, .. } = self.nodes[node];
            self.nodes[parent as usize].rows += rows;
        }
        let rows = self.nodes[0].rows as usize;
        order.clear();
        common.clear();
        order.resize(rows, 0);
        common.resize(rows, 0);
        self.sort_leaves();
        let mut from = 0;
        for node in 0..self.nodes.len() {
            let Node { leaves, place, .. } = self.nodes[node];
            let to = from + leaves as usize;
            let leaves = &mut self.sorted[from..to];
            if !leaves.is_sorted_by_key(|leaf| leaf.depth) {
                leaves.sort_by_key(|leaf| leaf.depth);
            }
            let mut place = place as usize;
            for (at, leaf) in leaves.iter().enumerate() {
                // Whoever leaves later has so much in common with this one.
                if at > 0 {
                    common[place] = leaves[at - 1].depth;
                }
                match leaf.what {
                    Leaves::Row(row) => {
                        order[place] = row;
                        place += 1;
                    }
                    Leaves::Node(child) => {
                        let child = &mut self.nodes[child as usize];
                        child.place = place as u32;
                        place += child.rows as usize;
                    }
                }
            }
            from = to;
        }
    }

    /// Brings what leaves one node together; otherwise in the order in which it came.
    fn sort_leaves(&mut self) {
        let nothing = Leaf {
            node: 0,
            depth: 0,
            what: Leaves::Row(0),
        };
        self.sorted.clear();
        self.sorted.resize(self.leaves.len(), nothing);
        let next = self.nodes.iter().scan(0, |end, node| {
            let begins = *end;
            *end += node.leaves;
            Some(begins)
        });
        self.numbers.clear();
        self.numbers.extend(next);
        for leaf in &self.leaves {
            let next = &mut self.numbers[leaf.node as usize];
            self.sorted[*next as usize] = *leaf;
            *next += 1;
        }
    }
}
