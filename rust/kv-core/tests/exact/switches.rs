//! A namespace that switches at a position: blocks before it are shared, the others are not.

use kv_core::{BlockManager, Config, Error, Event, Namespace, Prefill, SeqHandle};

use super::tools::{
    PLENTY, begin, commit, computed, decoded, manager, prefill, prompt, settings, table, with,
};

fn switching(at: usize, name: &[u8]) -> Namespace<'_> {
    Namespace::switching(b"", at, name)
}

fn sequence(m: &mut BlockManager, len: u32, at: usize, name: &[u8]) -> SeqHandle {
    let seq = m.sequence(prompt(len), switching(at, name), true);
    seq.expect("tokens")
}

/// A new sequence, computed in one step; its cached tokens.
fn run(m: &mut BlockManager, len: u32, at: usize, name: &[u8]) -> (SeqHandle, usize) {
    let seq = sequence(m, len, at, name);
    let plan = begin(m, PLENTY);
    prefill(m, plan.key(), &seq);
    commit(m, plan.key());
    let cached = m.view(seq.key()).expect("live").num_cached_tokens;
    assert_eq!(m.check(), Ok(()));
    (seq, cached)
}

#[test]
fn blocks_before_the_switch_are_the_namespaces() {
    for block_size in [1, 2, 3, 4, 16] {
        for at in [0, 1, 15, 16, 17, 32, 47, 48, 100] {
            let mut m = with(Config {
                partial_reuse: false,
                ..Config::new(256, block_size)
            });
            let base = computed(&mut m, prompt(49));
            let shared = at.min(48) / block_size * block_size;
            let (first, cached) = run(&mut m, 49, at, b"adapter");
            assert_eq!(cached, shared.min(48), "{block_size} {at}");
            let (_second, cached) = run(&mut m, 49, at, b"adapter");
            assert_eq!(cached, 48 / block_size * block_size);
            let (_other, cached) = run(&mut m, 49, at, b"another");
            assert_eq!(cached, shared.min(48));
            let expected = |tokens: usize| tokens / block_size * block_size;
            let mut matched = |namespace: Namespace<'_>| {
                m.match_prefix(&prompt(49), namespace)
                    .expect("short")
                    .num_tokens()
            };
            assert_eq!(matched(b"".into()), expected(49));
            assert_eq!(matched(switching(at, b"adapter")), expected(49));
            assert_eq!(matched(switching(at, b"third")), expected(at.min(49)));
            drop((base, first));
        }
    }
}

#[test]
fn a_copy_ends_at_the_switch() {
    let mut m = manager(16);
    drop(computed(&mut m, prompt(9)));
    // Of block 1, the adapter may copy the token before position 5.
    let (seq, cached) = run(&mut m, 9, 5, b"adapter");
    assert_eq!((cached, m.stats().partial_tokens), (5, 1));
    drop(seq);
    let (seq, cached) = run(&mut m, 7, 5, b"adapter"); // the last token is computed
    assert_eq!((cached, m.stats().partial_tokens), (6, 3));
    drop(seq);
    let (seq, cached) = run(&mut m, 9, 6, b"adapter");
    assert_eq!((cached, m.stats().partial_tokens), (6, 5));
    drop(seq);
}

#[test]
fn answers_are_labelled_too() {
    let mut m = manager(16);
    let base = computed(&mut m, prompt(6));
    let (seq, _) = run(&mut m, 6, 6, b"adapter"); // switches where the answer begins
    for _ in 0..4 {
        assert_eq!(decoded(&mut m, &[&base, &seq]), []);
        assert_eq!(m.check(), Ok(()));
    }
    let (own, other) = (table(&m, &base, 0), table(&m, &seq, 0));
    assert_eq!(own[0], other[0]);
    assert_ne!(own[1], other[1]);
    // Two of the same adapter are merged.
    let (twin, _) = run(&mut m, 6, 6, b"adapter");
    for _ in 0..4 {
        decoded(&mut m, &[&twin]);
    }
    assert_eq!(table(&m, &twin, 0)[1], other[1]);
    let fork = m.fork(seq.key(), 5).expect("at rest");
    m.append(fork.key(), &[5]).expect("at rest");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &fork);
    commit(&mut m, plan.key());
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn sequences_of_a_step_share_by_label() {
    let mut m = manager(16);
    let names: [&[u8]; 3] = [b"one", b"one", b"two"];
    let seqs = names.map(|name| sequence(&mut m, 12, 6, name));
    let plan = begin(&mut m, PLENTY);
    let mut cached = seqs
        .iter()
        .map(|seq| match m.prefill(plan.key(), seq.key(), PLENTY, None) {
            Ok(Prefill::Planned { cached_tokens, .. }) => cached_tokens,
            answer => panic!("{answer:?}"),
        });
    assert_eq!(cached.next(), Some(0));
    assert_eq!(cached.next(), Some(11));
    assert_eq!(cached.next(), Some(4));
    drop(cached);
    commit(&mut m, plan.key());
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn pins_are_attached_by_label() {
    let mut m = with(Config {
        groups: vec![None, Some(5)],
        ..settings(32)
    });
    let (_seq, _) = run(&mut m, 9, 5, b"adapter");
    let pin = m
        .match_prefix(&prompt(9), switching(5, b"adapter"))
        .expect("short");
    let base = m.match_prefix(&prompt(9), b"").expect("short");
    assert_eq!((pin.num_tokens(), base.num_tokens()), (8, 4));
    let plain = m.sequence(prompt(9), b"", true).expect("tokens");
    let refused = Error::PinMismatch {
        pin_tokens: 8,
        sequence_tokens: 9,
    };
    assert_eq!(m.attach(plain.key(), &pin), Err(refused.clone()));
    let other = sequence(&mut m, 9, 5, b"another");
    assert_eq!(m.attach(other.key(), &pin), Err(refused));
    assert_eq!(m.attach(other.key(), &base), Ok(()));
    let same = sequence(&mut m, 9, 5, b"adapter");
    assert_eq!(m.attach(same.key(), &pin), Ok(()));
    assert_eq!(m.check(), Ok(()));
}

#[test]
fn events_name_the_switch() {
    let mut m = manager(16);
    let (_seq, _) = run(&mut m, 13, 5, b"adapter");
    let hasher = m.hasher().clone();
    let root = hasher.root(b"");
    let first = hasher.child(root, &[0, 1, 2, 3]);
    let second = hasher.child(hasher.switch(first, 1, b"adapter"), &[4, 5, 6, 7]);
    let third = hasher.child(second, &[8, 9, 10, 11]);
    let stored = |hashes: &[u128], parent, tokens: std::ops::Range<u32>, switch| Event::Stored {
        hashes: hashes.to_vec(),
        parent,
        tokens: tokens.collect(),
        namespace: (*b"").into(),
        switch,
    };
    let adapter = Some((5, b"adapter"[..].into()));
    let expected = [
        stored(&[first], None, 0..4, None),
        stored(&[second, third], Some(first), 4..12, adapter),
    ];
    assert_eq!(m.take_events(), expected);
}

#[test]
fn misuse_is_named() {
    let mut m = manager(4);
    let mut error = |at, name: &[u8]| {
        let answer = m.sequence(vec![1], switching(at, name), true);
        answer.expect_err("misuse").to_string()
    };
    assert_eq!(
        error(3, b""),
        "the namespace switches at position 3 to an empty name; name the other one"
    );
    assert_eq!(
        error(1 << 32, b"adapter"),
        "the namespace switches at position 4294967296; a position is at most 4294967295"
    );
    assert!(m.match_prefix(&[1], switching(0, b"")).is_err());
    assert_eq!(m.num_prefixes(), 0);
}
