//! Shared prefixes as a tree, from ordered rows and the number of leading blocks that neighbours have in common.
//!
//! Shared prefixes are the intervals of that table, as in a suffix array (Abouelhoda, Kurtz and Ohlebusch, Replacing
//! suffix trees with enhanced suffix arrays, 2004): O(rows).

use std::ops::Range;

/// Leading blocks that several rows of a batch share, after those of `parent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// Its rows, as indices into [`SharedPrefixes::order`](super::SharedPrefixes::order).
    pub rows: Range<usize>,
    /// Its blocks, as indices in their block tables.
    pub blocks: Range<usize>,
    /// The shared prefix before this one.
    pub parent: Option<usize>,
}

/// Neighbouring rows that share their first `depth` blocks, and no row next to them does.
struct Interval {
    rows: Range<usize>,
    depth: usize,
}

/// Intervals of at least `min_rows` rows, from the last row to the first, outer ones first.
fn intervals(common: &[u32], min_rows: usize) -> Vec<Interval> {
    let mut open: Vec<(usize, usize)> = Vec::new(); // depth, first row
    let mut closed = Vec::new();
    for end in 1..=common.len() {
        let depth = common.get(end).map_or(0, |&depth| depth as usize);
        let mut first = end - 1;
        while let Some((depth, from)) = open.pop_if(|top| top.0 > depth) {
            first = from;
            if end - from >= min_rows {
                let rows = from..end;
                closed.push(Interval { rows, depth });
            }
        }
        if depth > open.last().map_or(0, |top| top.0) {
            open.push((depth, first));
        }
    }
    closed.reverse();
    closed
}

/// The kept prefixes around an interval.
#[derive(Clone, Default)]
struct Above {
    /// Blocks before this one are in a kept prefix.
    from: usize,
    kept: Option<usize>,
    level: usize,
}

/// The prefixes of at least `min_blocks` blocks and `min_rows` rows, level by level. `own`: for each row, the first
/// block that is in none of them. A prefix that is too short is left to the prefixes in it.
pub(super) fn prefixes(
    common: &[u32],
    min_blocks: usize,
    min_rows: usize,
    own: &mut Vec<u32>,
) -> Vec<SharedPrefix> {
    let mut kept: Vec<SharedPrefix> = Vec::new();
    let mut levels = Vec::new();
    let mut path: Vec<(usize, Above)> = Vec::new();
    for Interval { rows, depth } in intervals(common, min_rows) {
        // The innermost open interval that begins at or before this one contains it.
        while path.pop_if(|(first, _)| *first > rows.start).is_some() {}
        let mut above = path
            .last()
            .map(|(_, above)| above.clone())
            .unwrap_or_default();
        if depth - above.from >= min_blocks {
            levels.push((above.level, rows.start, kept.len()));
            kept.push(SharedPrefix {
                rows: rows.clone(),
                blocks: above.from..depth,
                parent: above.kept,
            });
            above = Above {
                from: depth,
                kept: Some(kept.len() - 1),
                level: above.level + 1,
            };
        }
        path.push((rows.start, above));
    }
    own_blocks(&kept, common.len(), own);
    by_level(kept, levels)
}

/// For each row, the first block in no prefix. `kept` goes from the last row to the first, outer ones first.
fn own_blocks(kept: &[SharedPrefix], rows: usize, own: &mut Vec<u32>) {
    own.clear();
    own.resize(rows, 0);
    let (mut next, mut around) = (kept.iter().peekable(), Vec::new());
    for row in (0..rows).rev() {
        while let Some(prefix) = next.next_if(|prefix| prefix.rows.end > row) {
            around.push(prefix);
        }
        while around.pop_if(|prefix| prefix.rows.start > row).is_some() {}
        own[row] = around.last().map_or(0, |prefix| prefix.blocks.end as u32);
    }
}

/// Sorts by level, then by rows.
fn by_level(kept: Vec<SharedPrefix>, mut levels: Vec<(usize, usize, usize)>) -> Vec<SharedPrefix> {
    levels.sort_unstable();
    let mut moved_to = vec![0; kept.len()];
    for (to, &(_, _, from)) in levels.iter().enumerate() {
        moved_to[from] = to;
    }
    let moved = levels.iter().map(|&(_, _, from)| SharedPrefix {
        parent: kept[from].parent.map(|parent| moved_to[parent]),
        ..kept[from].clone()
    });
    moved.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn equal(a: &[u8], b: &[u8]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    /// Sets of rows that share their first blocks while no row next to them does, and how many blocks.
    fn groups(tables: &[Vec<u8>]) -> BTreeSet<(Vec<usize>, usize)> {
        let mut groups = BTreeSet::new();
        for table in tables {
            for depth in 1..=table.len() {
                let alike = |row: &usize| equal(&tables[*row], table) >= depth;
                let rows: Vec<usize> = (0..tables.len()).filter(alike).collect();
                let common = rows
                    .iter()
                    .map(|&row| equal(&tables[row], &tables[rows[0]]));
                groups.insert((rows.clone(), common.min().unwrap_or(0)));
            }
        }
        groups.retain(|(rows, _)| rows.len() > 1);
        groups
    }

    proptest! {
        #[test]
        fn every_group_is_found(
            mut tables in prop::collection::vec(prop::collection::vec(0..3_u8, 0..7), 0..24),
            min_blocks in 1..4_usize,
            min_rows in 2..5_usize,
        ) {
            tables.sort();
            let pairs = tables.windows(2).map(|pair| equal(&pair[0], &pair[1]) as u32);
            let mut common: Vec<u32> = pairs.collect();
            if !tables.is_empty() {
                common.insert(0, 0);
            }
            let mut own = Vec::new();
            let built = prefixes(&common, 1, 2, &mut own);
            let ends = built.iter().map(|it| (it.rows.clone().collect(), it.blocks.end));
            prop_assert_eq!(ends.collect::<BTreeSet<_>>(), groups(&tables));

            let built = prefixes(&common, min_blocks, min_rows, &mut own);
            for (at, it) in built.iter().enumerate() {
                prop_assert!(it.blocks.len() >= min_blocks && it.rows.len() >= min_rows);
                let before = it.parent.map_or(0, |parent| built[parent].blocks.end);
                prop_assert_eq!(it.blocks.start, before);
                if let Some(parent) = it.parent {
                    let outer = &built[parent].rows;
                    prop_assert!(parent < at && outer.start <= it.rows.start && it.rows.end <= outer.end);
                }
            }
            for (row, &own) in own.iter().enumerate() {
                let around = built.iter().filter(|it| it.rows.contains(&row));
                let end = around.map(|it| it.blocks.end).max().unwrap_or(0);
                prop_assert_eq!(own as usize, end);
            }
        }
    }

    #[test]
    fn a_path_of_a_thousand_levels() {
        let common: Vec<u32> = (0..1_000).collect();
        let mut own = Vec::new();
        let built = prefixes(&common, 1, 2, &mut own);
        assert_eq!(built.len(), 999);
        assert!(
            built
                .iter()
                .enumerate()
                .all(|(at, it)| it.parent == at.checked_sub(1))
        );
        // The first row shares one block with the second; the last two share all.
        assert_eq!((own[0], own[1], own[998], own[999]), (1, 2, 999, 999));
    }
}
