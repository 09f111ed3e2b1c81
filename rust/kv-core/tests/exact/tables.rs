//! Block tables: only what has changed is written.

use kv_core::{BlockManager, Config, SeqHandle, TableRows};

use super::arrays::{Arrays, LEFT, Sizes, TABLES};
use super::tools::{
    PLENTY, begin, commit, computed, manager, prefill, prompt, settings, table, with,
};

#[test]
fn a_row_is_written_on_where_it_ended() {
    for groups in [1, 2] {
        let mut m = with(Config {
            groups: vec![None; groups],
            ..settings(16)
        });
        let seqs = [4, 7].map(|len| computed(&mut m, prompt(len)));
        let keys = seqs.each_ref().map(SeqHandle::key);
        let sizes = Sizes {
            groups,
            columns: 4,
            ..Sizes::exactly(2, 2, 4, 2)
        };
        let (arrays, mut rows) = (Arrays::new(sizes), TableRows::default());
        let mut step = |m: &mut BlockManager| {
            let plan = begin(m, PLENTY);
            assert_eq!(m.decode(plan.key(), &keys, 0), Ok(vec![]));
            assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
            commit(m, plan.key());
            let written = arrays.values(TABLES);
            arrays.cells[TABLES].iter().for_each(|cell| cell.set(LEFT));
            written
        };
        let row = |m: &BlockManager, group: usize, seq: usize, from: usize| {
            let blocks = table(m, &seqs[seq], group);
            let id = |at| match blocks.get(at) {
                Some(Some(block)) if at >= from => i64::from(*block),
                _ => LEFT,
            };
            (0..4).map(id).collect::<Vec<_>>()
        };
        let rows = |m: &BlockManager, from: [usize; 2]| {
            let both = |group| [row(m, group, 0, from[0]), row(m, group, 1, from[1])].concat();
            (0..groups).flat_map(both).collect::<Vec<_>>()
        };
        // Both whole; then the second one's third block; then nothing.
        assert_eq!(step(&mut m), rows(&m, [0, 0]));
        assert_eq!(step(&mut m), rows(&m, [9, 2]));
        assert_eq!(step(&mut m), rows(&m, [9, 9]));
    }
}

#[test]
fn a_row_that_has_changed_is_written_whole() {
    let mut m = manager(8);
    let seqs = [(); 2].map(|()| computed(&mut m, prompt(3)));
    let keys = seqs.each_ref().map(SeqHandle::key);
    let arrays = Arrays::new(Sizes::exactly(2, 2, 2, 2));
    let mut rows = TableRows::default();
    let mut step = |m: &mut BlockManager, keys: &[_]| {
        arrays.cells[TABLES].iter().for_each(|cell| cell.set(LEFT));
        let plan = begin(m, PLENTY);
        assert_eq!(m.decode(plan.key(), keys, 0), Ok(vec![]));
        assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
        commit(m, plan.key());
        arrays.values(TABLES)
    };
    assert_eq!(step(&mut m, &keys), [0, LEFT, 1, LEFT]);
    // Its commit has merged the second one's block with the first one's.
    assert_eq!(step(&mut m, &keys), [LEFT, 1, 0, 2]);
    // Another sequence in the row.
    assert_eq!(step(&mut m, &[keys[1], keys[0]]), [0, 2, 0, 1]);
    // Another manager's sequence of the same number.
    let mut other = manager(8);
    let theirs = [(); 2].map(|()| computed(&mut other, prompt(1)));
    let keys = [theirs[1].key(), theirs[0].key()];
    assert_eq!(step(&mut other, &keys), [1, LEFT, 0, LEFT]);
}

#[test]
fn what_was_given_back_reads_as_the_null_block() {
    let mut m = with(Config {
        groups: vec![Some(4)],
        ..settings(8)
    });
    let seq = computed(&mut m, prompt(12));
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
    let arrays = Arrays::new(Sizes::exactly(1, 1, 4, 1));
    assert_eq!(arrays.fill(&m, plan.key()), Ok(()));
    let ids = table(&m, &seq, 0);
    assert_eq!(ids[..2], [None, None]);
    let [third, fourth] = [ids[2], ids[3]].map(|id| i64::from(id.expect("a block")));
    assert_eq!(arrays.values(TABLES), [8, 8, third, fourth]);
}

#[test]
fn a_row_that_slid_is_written_whole() {
    let mut m = with(Config {
        groups: vec![Some(4)],
        ..settings(8)
    });
    let seq = computed(&mut m, prompt(7));
    let (arrays, mut rows) = (
        Arrays::new(Sizes::exactly(1, 1, 3, 1)),
        TableRows::default(),
    );
    for expected in [[0, 1, LEFT], [8, 1, 2]] {
        let plan = begin(&mut m, PLENTY);
        assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
        assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
        assert_eq!(arrays.values(TABLES), expected);
        commit(&mut m, plan.key());
    }
}

/// A fork writes on a copy; that step is rolled back and the fork is the last one to hold the block.
#[test]
fn a_copy_that_was_taken_back_is_written_over() {
    for more in [1, 3] {
        let mut m = manager(8);
        let seq = computed(&mut m, prompt(6));
        let fork = m.fork(seq.key(), 6).expect("within");
        m.append(fork.key(), &vec![77; more]).expect("in no plan");
        let sizes = Sizes::exactly(more, 1, 3, 1);
        let (arrays, mut rows) = (Arrays::new(sizes), TableRows::default());
        let mut step = |m: &mut BlockManager| {
            let plan = begin(m, PLENTY);
            prefill(m, plan.key(), &fork);
            assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
            let copies = m.copies(plan.key()).expect("open").len();
            let row = arrays.values(TABLES);
            m.rollback(plan.key()).expect("the newest");
            (copies, row[..2].to_vec())
        };
        assert_eq!(step(&mut m), (1, vec![0, 2]), "{more} tokens more");
        m.reset(seq.key()).expect("in no plan");
        assert_eq!(step(&mut m), (0, vec![0, 1]), "{more} tokens more");
    }
}

#[test]
fn a_row_whose_sequence_began_anew_is_written_whole() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(3));
    let (arrays, mut rows) = (
        Arrays::new(Sizes::exactly(4, 1, 1, 1)),
        TableRows::default(),
    );
    let plan = begin(&mut m, PLENTY);
    assert_eq!(m.decode(plan.key(), &[seq.key()], 0), Ok(vec![]));
    assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
    assert_eq!(arrays.values(TABLES), [0]);
    m.rollback(plan.key()).expect("the newest");
    m.reset(seq.key()).expect("in no plan");
    let _other = computed(&mut m, vec![7]); // takes its block
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    assert_eq!(m.fill(plan.key(), &arrays.views(), &mut rows), Ok(()));
    assert_eq!(arrays.values(TABLES), [1]);
}
