//! Which rows share which leading blocks, as it is said: all those that begin alike, and what they have in common.

use std::collections::BTreeMap;

use kv_core::SharedPrefixes;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Rows, the blocks that they share, and the rows of the prefix before it.
type Shared = (Vec<usize>, (usize, usize), Option<Vec<usize>>);

#[derive(Clone, Copy)]
pub(crate) struct Least {
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
    least: Least,
    found: &mut Vec<Shared>,
) {
    let mut next: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    for &row in rows {
        let block = tables[row].get(depth).copied();
        next.entry(block).or_default().push(row);
    }
    if next.len() == 1 && !next.contains_key(&None) {
        return split(tables, rows, (depth + 1, from), parent, least, found);
    }
    let long = rows.len() >= least.rows && depth - from >= least.blocks;
    let mine = rows.to_vec();
    let (from, parent) = if long {
        found.push((mine.clone(), (from, depth), parent.cloned()));
        (depth, Some(&mine))
    } else {
        (from, parent)
    };
    for (block, rows) in next {
        if block.is_some() && rows.len() > 1 {
            split(tables, &rows, (depth + 1, from), parent, least, found);
        }
    }
}

/// The manager says the same of a batch whose rows hold these blocks before what they compute.
pub(crate) fn compare(
    shared: &SharedPrefixes,
    tables: &[Vec<usize>],
    least: Least,
) -> Result<(), TestCaseError> {
    let all: Vec<usize> = (0..tables.len()).collect();
    let mut expected = Vec::new();
    if !all.is_empty() {
        split(tables, &all, (0, 0), None, least, &mut expected);
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
    let (mut found, mut last) = (Vec::new(), (0, 0));
    let mut levels: Vec<usize> = Vec::new();
    let mut own = vec![0; tables.len()];
    for (at, prefix) in shared.prefixes().iter().enumerate() {
        prop_assert!(prefix.parent.is_none_or(|parent| parent < at));
        levels.push(prefix.parent.map_or(0, |parent| levels[parent] + 1));
        let place = (levels[at], prefix.rows.start);
        prop_assert!(at == 0 || last < place, "level by level, row by row");
        last = place;
        let blocks = (prefix.blocks.start, prefix.blocks.end);
        rows(at).iter().for_each(|&row| own[row] = blocks.1 as u32);
        found.push((rows(at), blocks, prefix.parent.map(rows)));
    }
    found.sort();
    prop_assert_eq!(found, expected);
    prop_assert_eq!(shared.own_blocks(), &own[..]);
    Ok(())
}
