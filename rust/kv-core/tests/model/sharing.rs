//! The shared prefixes of rows by their definition: all rows that begin alike, and their common blocks.

use std::collections::BTreeMap;

use kv_core::SharedPrefixes;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Rows, the blocks that they share, and the rows of the prefix before it.
type Shared = (Vec<usize>, (usize, usize), Option<Vec<usize>>);

#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) blocks: usize,
    pub(crate) rows: usize,
}

/// What `rows` share, which begin with the same `depth` blocks; `from` and `parent` are where the prefix
/// before ends, and its rows.
fn split(
    tables: &[Vec<usize>],
    rows: &[usize],
    (depth, from): (usize, usize),
    parent: Option<&Vec<usize>>,
    limits: Limits,
    prefixes: &mut Vec<Shared>,
) {
    let mut next: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    for &row in rows {
        let block = tables[row].get(depth).copied();
        next.entry(block).or_default().push(row);
    }
    if next.len() == 1 && !next.contains_key(&None) {
        return split(tables, rows, (depth + 1, from), parent, limits, prefixes);
    }
    let long = rows.len() >= limits.rows && depth - from >= limits.blocks;
    let mine = rows.to_vec();
    let (from, parent) = if long {
        prefixes.push((mine.clone(), (from, depth), parent.cloned()));
        (depth, Some(&mine))
    } else {
        (from, parent)
    };
    for (block, rows) in next {
        if block.is_some() && rows.len() > 1 {
            split(tables, &rows, (depth + 1, from), parent, limits, prefixes);
        }
    }
}

/// The manager says the same of a batch whose rows hold these blocks before what they compute.
pub(crate) fn compare(
    shared: &SharedPrefixes,
    tables: &[Vec<usize>],
    limits: Limits,
) -> Result<(), TestCaseError> {
    let all: Vec<usize> = (0..tables.len()).collect();
    let mut expected = Vec::new();
    if !all.is_empty() {
        split(tables, &all, (0, 0), None, limits, &mut expected);
    }
    expected.sort();
    let order: Vec<usize> = shared.order().iter().map(|&row| row as usize).collect();
    let mut sorted = order.clone();
    sorted.sort_unstable();
    prop_assert_eq!(sorted, all);
    let rows = |at: usize| {
        let mut rows = order[shared.prefixes()[at].rows.clone()].to_vec();
        rows.sort_unstable();
        rows
    };
    let (mut prefixes, mut last) = (Vec::new(), (0, 0));
    let mut levels: Vec<usize> = Vec::new();
    let mut own = vec![0; tables.len()];
    for (at, prefix) in shared.prefixes().iter().enumerate() {
        prop_assert!(prefix.parent.is_none_or(|parent| parent < at));
        levels.push(prefix.parent.map_or(0, |parent| levels[parent] + 1));
        let order = (levels[at], prefix.rows.start);
        prop_assert!(at == 0 || last < order, "level by level, row by row");
        last = order;
        let blocks = (prefix.blocks.start, prefix.blocks.end);
        rows(at).iter().for_each(|&row| own[row] = blocks.1 as u32);
        prefixes.push((rows(at), blocks, prefix.parent.map(rows)));
    }
    prefixes.sort();
    prop_assert_eq!(prefixes, expected);
    prop_assert_eq!(shared.own_blocks(), &own[..]);
    Ok(())
}
