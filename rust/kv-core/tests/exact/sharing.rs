//! Shared prefixes of the rows of a step, and when they are computed again.

use kv_core::{
    BlockManager, Config, Error, IntArray, PlanKey, PrefixArrays, SeqHandle, SharedI32,
    SharedPrefixes, TableRows,
};

use super::arrays::{Arrays, LEFT, LENS, Sizes};
use super::tools::{
    PLENTY, begin, commit, computed, manager, prefill, prompt, sequence, settings, with,
};

/// Arrays of a runner, and what its rows share.
struct Runner {
    arrays: Arrays,
    rows: TableRows,
    shared: SharedPrefixes,
}

/// First row, end, first block, end, parent.
type Prefix = (usize, usize, usize, usize, Option<usize>);

impl Runner {
    fn new(group: usize, min_blocks: usize, min_rows: usize) -> Self {
        let sizes = Sizes {
            groups: 2,
            slots: 64,
            rows: 8,
            columns: 16,
            ..Sizes::exactly(64, 8, 16, 8)
        };
        Self {
            arrays: Arrays::new(sizes),
            rows: TableRows::default(),
            shared: SharedPrefixes::new(group, min_blocks, min_rows).expect("valid"),
        }
    }

    /// The order of the rows, their prefixes, where their own blocks begin.
    fn fill(&mut self, m: &BlockManager, plan: PlanKey) -> (Vec<u32>, Vec<Prefix>, Vec<u32>) {
        let filled = m.fill_shared(plan, &self.arrays.views(), &mut self.rows, &mut self.shared);
        assert_eq!(filled, Ok(()));
        let prefixes = self.shared.prefixes().iter().map(|it| {
            let (rows, blocks) = (&it.rows, &it.blocks);
            (rows.start, rows.end, blocks.start, blocks.end, it.parent)
        });
        let (order, own) = (self.shared.order(), self.shared.own_blocks());
        (order.to_vec(), prefixes.collect(), own.to_vec())
    }

    /// Decodes all of these in a step, and commits it.
    fn decode(&mut self, m: &mut BlockManager, seqs: &[&SeqHandle]) -> Vec<Prefix> {
        let plan = begin(m, PLENTY);
        let keys: Vec<_> = seqs.iter().map(|seq| seq.key()).collect();
        assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
        let (_, prefixes, _) = self.fill(m, plan.key());
        commit(m, plan.key());
        prefixes
    }
}

/// The first `common` tokens of the prompt `prompt(common)`, and then others.
fn begins(common: u32, len: u32, other: u32) -> Vec<u32> {
    let rest = (common..len).map(|at| other * 1_000 + at);
    (0..common).chain(rest).collect()
}

#[test]
fn groups_are_nested_and_their_rows_need_not_stand_together() {
    let mut m = manager(64);
    // Rows 0, 2 and 4 begin with three blocks; 0 and 4 go on alike for two more; 1 and 3 are alone.
    let prompts = [
        begins(20, 24, 1),
        begins(0, 9, 2),
        begins(12, 22, 3),
        begins(0, 9, 4),
        begins(20, 27, 5),
    ];
    let seqs = prompts.map(|tokens| computed(&mut m, tokens));
    let plan = begin(&mut m, PLENTY);
    let keys = seqs.each_ref().map(SeqHandle::key);
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
    let (order, prefixes, own) = Runner::new(0, 1, 2).fill(&m, plan.key());
    assert_eq!(order, [2, 4, 0, 1, 3]);
    assert_eq!(prefixes, [(0, 3, 0, 3, None), (1, 3, 3, 5, Some(0))]);
    assert_eq!(own, [5, 0, 3, 0, 5]);
}

#[test]
fn what_is_too_short_or_too_few_belongs_to_those_in_it() {
    let mut m = manager(64);
    let prompts = [begins(20, 24, 1), begins(20, 24, 2), begins(4, 24, 3)];
    let seqs = prompts.map(|tokens| computed(&mut m, tokens));
    let plan = begin(&mut m, PLENTY);
    let keys = seqs.each_ref().map(SeqHandle::key);
    assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
    for ((min_blocks, min_rows), expected, own) in [
        (
            (1, 2),
            vec![(0, 3, 0, 1, None), (1, 3, 1, 5, Some(0))],
            [5, 5, 1],
        ),
        ((2, 2), vec![(1, 3, 0, 5, None)], [5, 5, 0]),
        ((5, 2), vec![(1, 3, 0, 5, None)], [5, 5, 0]),
        ((6, 2), vec![], [0, 0, 0]),
        ((1, 3), vec![(0, 3, 0, 1, None)], [1, 1, 1]),
    ] {
        let filled = Runner::new(0, min_blocks, min_rows).fill(&m, plan.key());
        assert_eq!(filled.0, [2, 1, 0]);
        assert_eq!((&filled.1, &filled.2[..]), (&expected, &own[..]));
    }
}

#[test]
fn a_prefix_ends_before_what_a_row_computes() {
    let mut m = manager(64);
    let plan = begin(&mut m, PLENTY);
    // The first computes all of it, the others share it in the same step and compute a token each.
    let seqs = [16, 16, 18].map(|len| sequence(&mut m, prompt(len)));
    seqs.iter().for_each(|seq| prefill(&mut m, plan.key(), seq));
    let mut runner = Runner::new(0, 1, 2);
    let (_, prefixes, own) = runner.fill(&m, plan.key());
    // Position 15 sees all four blocks; position 0 sees none.
    assert_eq!((prefixes.len(), own), (1, vec![0, 4, 4]));
    assert_eq!((prefixes[0].2, prefixes[0].3), (0, 4));
    commit(&mut m, plan.key());
    // One step later all of them have it behind them.
    let prefixes = runner.decode(&mut m, &[&seqs[0], &seqs[1], &seqs[2]]);
    assert_eq!(prefixes, [(0, 3, 0, 4, None)]);
}

#[test]
fn nothing_is_done_while_the_batch_stays_the_same() {
    let mut m = manager(64);
    let seqs = [1, 2, 3].map(|other| computed(&mut m, begins(9, 14, other)));
    let [a, b, c] = &seqs;
    let mut runner = Runner::new(0, 1, 2);
    // Over block boundaries: new blocks of one sequence change nothing.
    for _ in 0..9 {
        assert_eq!(runner.decode(&mut m, &[a, b, c]), [(0, 3, 0, 2, None)]);
        assert_eq!(runner.shared.version(), 1);
    }
    assert_eq!(runner.decode(&mut m, &[a, b]), [(0, 2, 0, 2, None)]);
    assert_eq!(runner.shared.version(), 2);
    // Who is filled without being asked is noticed all the same.
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[a.key(), c.key()], 0), Ok(vec![]));
    let filled = m.fill(plan.key(), &runner.arrays.views(), &mut runner.rows);
    assert_eq!(filled, Ok(()));
    commit(&mut m, plan.key());
    assert_eq!(runner.decode(&mut m, &[a, c]), [(0, 2, 0, 2, None)]);
    assert_eq!(runner.shared.version(), 3);
    // Other arrays say nothing of these.
    runner.rows = TableRows::default();
    assert_eq!(runner.decode(&mut m, &[a, c]), [(0, 2, 0, 2, None)]);
    assert_eq!(runner.shared.version(), 4);
}

#[test]
fn a_merge_is_noticed() {
    let mut m = manager(64);
    let seqs = [0, 1].map(|_| sequence(&mut m, prompt(3)));
    let plan = begin(&mut m, PLENTY);
    seqs.iter().for_each(|seq| prefill(&mut m, plan.key(), seq));
    commit(&mut m, plan.key());
    let mut runner = Runner::new(0, 1, 2);
    // Both fill their first block with the same tokens: it becomes one.
    assert_eq!(runner.decode(&mut m, &[&seqs[0], &seqs[1]]), []);
    let merged = [(0, 2, 0, 1, None)];
    assert_eq!(runner.decode(&mut m, &[&seqs[0], &seqs[1]]), merged);
}

#[test]
fn a_preemption_is_noticed() {
    let mut m = manager(64);
    let seqs = [1, 2].map(|other| computed(&mut m, begins(9, 14, other)));
    let mut runner = Runner::new(0, 1, 2);
    let pair = [&seqs[0], &seqs[1]];
    assert_eq!(runner.decode(&mut m, &pair), [(0, 2, 0, 2, None)]);
    assert_eq!(m.reset(seqs[1].key()), Ok(()));
    m.evict_all();
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[seqs[0].key()], 0), Ok(vec![]));
    prefill(&mut m, plan.key(), &seqs[1]); // finds the two blocks of the other, and computes what is its own
    let (_, prefixes, _) = runner.fill(&m, plan.key());
    assert_eq!(prefixes, [(0, 2, 0, 2, None)]);
    assert_eq!(runner.shared.version(), 2);
    commit(&mut m, plan.key());
}

#[test]
fn forks_share_without_a_cache() {
    let mut m = with(Config {
        prefix_caching: false,
        ..settings(64)
    });
    let parent = computed(&mut m, prompt(10));
    let fork = m.fork(parent.key(), 11).expect("at rest");
    let alone = computed(&mut m, prompt(10));
    let mut runner = Runner::new(0, 1, 2);
    let all = [&parent, &alone, &fork];
    assert_eq!(runner.decode(&mut m, &all), [(0, 2, 0, 2, None)]);
    let mut order = runner.shared.order()[..2].to_vec();
    order.sort_unstable();
    assert_eq!(
        (order, runner.shared.own_blocks()),
        (vec![0, 2], &[2, 0, 2][..])
    );
    for _ in 0..6 {
        assert_eq!(runner.decode(&mut m, &all), [(0, 2, 0, 2, None)]);
    }
    assert_eq!(runner.shared.version(), 1);
}

#[test]
fn the_older_step_is_told_of_as_it_is() {
    let mut m = manager(64);
    let parent = computed(&mut m, prompt(9));
    let fork = m.fork(parent.key(), 10).expect("at rest");
    let other = computed(&mut m, begins(4, 9, 7));
    let older = begin(&mut m, PLENTY);
    let keys = [parent.key(), other.key()];
    assert_eq!(m.decode(older.key(), &keys, 0), Ok(vec![]));
    let newer = begin(&mut m, PLENTY);
    let keys = [parent.key(), fork.key(), other.key()];
    assert_eq!(m.decode(newer.key(), &keys, 0), Ok(vec![]));
    let mut runner = Runner::new(0, 1, 2);
    assert_eq!(runner.fill(&m, older.key()).1, [(0, 2, 0, 1, None)]);
    let (_, prefixes, own) = runner.fill(&m, newer.key());
    assert_eq!((prefixes.len(), own), (2, vec![2, 2, 1]));
}

/// Two steps are open; the newer one is filled first, with the same rows in the same arrays.
#[test]
fn a_row_begins_earlier_in_the_step_before() {
    let mut m = manager(64);
    let seqs = [0, 1].map(|_| sequence(&mut m, prompt(8)));
    let older = begin(&mut m, PLENTY);
    seqs.iter()
        .for_each(|seq| prefill(&mut m, older.key(), seq));
    let newer = begin(&mut m, PLENTY);
    let keys = seqs.each_ref().map(SeqHandle::key);
    assert_eq!(m.decode(newer.key(), &keys, 0), Ok(vec![]));
    let mut runner = Runner::new(0, 1, 2);
    assert_eq!(runner.fill(&m, newer.key()).1, [(0, 2, 0, 2, None)]);
    assert_eq!(runner.fill(&m, older.key()).1, []);
    assert_eq!(runner.fill(&m, newer.key()).1, [(0, 2, 0, 2, None)]);
}

#[test]
fn a_group_with_a_window_shares_nothing() {
    let mut m = with(Config {
        groups: vec![None, Some(8)],
        ..settings(64)
    });
    let seqs = [1, 2].map(|other| computed(&mut m, begins(9, 14, other)));
    let (mut full, mut window) = (Runner::new(0, 1, 2), Runner::new(1, 1, 2));
    let pair = [&seqs[0], &seqs[1]];
    assert_eq!(full.decode(&mut m, &pair), [(0, 2, 0, 2, None)]);
    assert_eq!(window.decode(&mut m, &pair), []);
    assert_eq!(window.shared.order(), [0, 1]);
    assert_eq!(window.shared.own_blocks(), [0, 0]);
    let plan = begin(&mut m, PLENTY);
    let mut third = Runner::new(2, 1, 2);
    let answer = m.fill_shared(
        plan.key(),
        &third.arrays.views(),
        &mut third.rows,
        &mut third.shared,
    );
    assert_eq!(
        answer,
        Err(Error::UnknownGroup {
            group: 2,
            groups: 2
        })
    );
    assert!(third.arrays.untouched());
}

#[test]
fn limits_that_leave_nothing_to_share_are_refused() {
    for (blocks, rows, name, min, given) in [
        (0, 2, "min_blocks", 1, 0),
        (1, 1, "min_rows", 2, 1),
        (1, 0, "min_rows", 2, 0),
    ] {
        let refused = SharedPrefixes::new(0, blocks, rows).err();
        assert_eq!(refused, Some(Error::TooFew { name, min, given }));
    }
    let error = Error::TooFew {
        name: "min_rows",
        min: 2,
        given: 1,
    };
    assert_eq!(error.to_string(), "min_rows must be at least 2, got 1");
    let error = Error::UnknownGroup {
        group: 2,
        groups: 1,
    };
    assert_eq!(error.to_string(), "there are 1 layer groups, got group=2");
}

#[test]
fn what_is_found_goes_into_arrays() {
    let mut m = manager(64);
    let seqs = [begins(8, 12, 1), begins(0, 9, 2), begins(8, 12, 3)].map(|it| computed(&mut m, it));
    let mut runner = Runner::new(0, 1, 2);
    runner.decode(&mut m, &[&seqs[0], &seqs[1], &seqs[2]]);
    let cells = || vec![SharedI32::new(LEFT as i32); 11];
    let (order, own, prefixes) = (cells(), cells(), cells());
    let arrays = PrefixArrays {
        order: IntArray::I32(&order[..3]),
        own_blocks: IntArray::I32(&own[..3]),
        prefixes: IntArray::I32(&prefixes[..10]),
    };
    assert_eq!(arrays.check(3), Ok(()));
    runner.shared.write(&arrays);
    let values = |cells: &[SharedI32], many: usize| -> Vec<i32> {
        assert!(cells[many..].iter().all(|cell| cell.get() == LEFT as i32));
        cells[..many].iter().map(SharedI32::get).collect()
    };
    assert_eq!(values(&order, 3), [2, 0, 1]);
    assert_eq!(values(&own, 3), [2, 0, 2]);
    assert_eq!(values(&prefixes, 5), [0, 2, 0, 2, -1]);
    for (name, needed, given, few) in [
        (
            "order",
            3,
            2,
            PrefixArrays {
                order: IntArray::I32(&order[..2]),
                ..arrays
            },
        ),
        (
            "own_blocks",
            3,
            2,
            PrefixArrays {
                own_blocks: IntArray::I32(&own[..2]),
                ..arrays
            },
        ),
        (
            "prefixes (rows)",
            2,
            1,
            PrefixArrays {
                prefixes: IntArray::I32(&prefixes[..9]),
                ..arrays
            },
        ),
    ] {
        let error = Error::BufferTooSmall {
            name,
            needed,
            given,
        };
        assert_eq!(few.check(3), Err(error));
    }
    assert_eq!(runner.arrays.values(LENS)[0], 13);
}

#[test]
fn a_step_that_cannot_be_filled_leaves_what_was_found() {
    let mut m = manager(64);
    let seqs = [1, 2].map(|other| computed(&mut m, begins(9, 14, other)));
    let mut runner = Runner::new(0, 1, 2);
    runner.decode(&mut m, &[&seqs[0], &seqs[1]]);
    let plan = begin(&mut m, PLENTY);
    let small = Arrays::new(Sizes::exactly(0, 0, 0, 0));
    let long = sequence(&mut m, prompt(3));
    prefill(&mut m, plan.key(), &long);
    let answer = m.fill_shared(
        plan.key(),
        &small.views(),
        &mut runner.rows,
        &mut runner.shared,
    );
    assert!(
        matches!(answer, Err(Error::BufferTooSmall { .. })),
        "{answer:?}"
    );
    assert_eq!(runner.shared.prefixes().len(), 1);
    assert_eq!(m.rollback(plan.key()), Ok(()));
    let answer = m.fill_shared(
        plan.key(),
        &runner.arrays.views(),
        &mut runner.rows,
        &mut runner.shared,
    );
    assert!(
        matches!(answer, Err(Error::PlanClosed { .. })),
        "{answer:?}"
    );
    assert_eq!(runner.shared.version(), 1);
}
