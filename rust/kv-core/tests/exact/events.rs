//! Events: which are emitted, in which order.

use std::collections::HashSet;
use std::sync::Arc;

use kv_core::{BlockManager, Config, Event, Eviction};

use super::tools::{
    CLEARED, PLENTY, begin, block_of, commit, computed, given_up, lose_the_head, manager, prefill,
    prompt, removed, sequence, settings, used, with,
};

/// The hashes of the blocks of a prompt.
fn hashes(m: &BlockManager, tokens: &[u32]) -> Vec<u128> {
    let mut parent = m.hasher().root(b"");
    let next = |tokens| {
        parent = m.hasher().child(parent, tokens);
        parent
    };
    tokens.chunks_exact(4).map(next).collect()
}

/// The event of a prompt of which nothing was there.
fn stored(m: &BlockManager, tokens: &[u32]) -> Vec<Event> {
    vec![Event::Stored {
        hashes: hashes(m, tokens),
        parent: None,
        tokens: tokens.into(),
        namespace: Arc::default(),
        switch: None,
    }]
}

#[test]
fn parents_are_stored_first_and_when_the_step_is_committed() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(14));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    assert_eq!((m.take_events(), m.cached_hashes()), (vec![], vec![]));
    commit(&mut m, plan.key());
    assert_eq!(m.take_events(), stored(&m, &prompt(12)));
    assert_eq!(m.take_events(), []);
    let mut cached = m.cached_hashes();
    let mut expected = hashes(&m, &prompt(12));
    cached.sort_unstable();
    expected.sort_unstable();
    assert_eq!(cached, expected);
}

#[test]
fn a_namespace_is_told() {
    let mut m = manager(8);
    let seq = m.sequence(prompt(4), b"tenant", true).expect("tokens");
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    commit(&mut m, plan.key());
    let hash = m.hasher().child(m.hasher().root(b"tenant"), &prompt(4));
    let event = Event::Stored {
        hashes: vec![hash],
        parent: None,
        tokens: prompt(4),
        namespace: (*b"tenant").into(),
        switch: None,
    };
    assert_eq!(m.take_events(), [event]);
}

#[test]
fn a_rollback_has_stored_nothing() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(9));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &seq);
    m.rollback(plan.key()).expect("the newest");
    assert_eq!((m.take_events(), m.cached_hashes()), (vec![], vec![]));
}

#[test]
fn an_eviction_is_told_content_by_content() {
    let mut m = manager(2);
    used(&mut m, [1, 2]);
    m.take_events();
    assert_eq!(given_up(&mut m, 1, &[1, 2]), [1]);
    let expected = [m.hasher().child(m.hasher().root(b""), &block_of(2))];
    assert_eq!(m.cached_hashes(), expected);
}

#[test]
fn cleared_says_that_nothing_is_left() {
    let mut m = manager(8);
    let held = computed(&mut m, block_of(1));
    used(&mut m, [2, 3]);
    m.take_events();
    // One is left: each that goes is named.
    let gone = [2, 3].map(|name| hashes(&m, &block_of(name))[0]);
    assert_eq!(m.evict_all(), 2);
    let events = m.take_events();
    assert_eq!((removed(&events), events.len()), (gone.to_vec(), 1));
    // No block is left. Earlier events are kept.
    drop(held);
    used(&mut m, [4]);
    assert_eq!(m.evict_all(), 2);
    let expected = [stored(&m, &block_of(4)), vec![CLEARED]].concat();
    assert_eq!(m.take_events(), expected);
    // Nothing was there.
    assert_eq!((m.evict_all(), m.take_events()), (0, vec![]));
}

#[test]
fn without_events_nothing_is_kept() {
    let mut m = with(Config {
        events: false,
        ..settings(3)
    });
    used(&mut m, [1, 2, 3, 4]);
    let _held = computed(&mut m, block_of(5));
    m.evict_all();
    assert_eq!(m.stats().evicted_blocks, 4);
    drop(_held);
    m.evict_all();
    assert_eq!(m.take_events(), []);
}

#[test]
fn a_content_is_removed_with_the_last_of_its_groups_blocks() {
    let mut m = with(Config {
        groups: vec![None, None],
        ..settings(3)
    });
    used(&mut m, [1]);
    m.take_events();
    // One block is free, two hold cached block 1: a row takes the free one and one of those.
    let taker = computed(&mut m, vec![7, 7]);
    assert_eq!(removed(&m.take_events()), []);
    assert_eq!((m.stats().evicted_blocks, m.cached_hashes().len()), (1, 1));
    drop(taker);
    m.evict_all();
    assert_eq!(m.take_events(), [CLEARED]);
}

/// One of its groups had held it all the time.
#[test]
fn a_content_that_gets_a_lost_block_again_is_no_news() {
    let mut m = with(Config {
        groups: vec![None, None],
        ..settings(7)
    });
    let seq = computed(&mut m, prompt(12));
    assert_eq!(m.take_events(), stored(&m, &prompt(12)));
    drop(seq);
    // One block is free and six are evictable: two rows evict the last block in both groups, and one more.
    drop(computed(&mut m, vec![7; 7]));
    let lost = [hashes(&m, &prompt(12))[2]];
    assert_eq!(removed(&m.take_events()[..1]), lost);
    let before = m.stats();
    assert_eq!((before.evicted_blocks, before.registered_blocks), (3, 4));
    let _again = computed(&mut m, prompt(8));
    let stats = m.stats();
    assert_eq!(
        (stats.registered_blocks, stats.already_cached_blocks),
        (4, 1)
    );
    assert_eq!(removed(&m.take_events()), []);
}

/// The block after it is, which both groups had lost.
#[test]
fn what_follows_a_content_that_was_there_is_news() {
    let mut m = with(Config {
        groups: vec![None, None],
        ..settings(7)
    });
    drop(computed(&mut m, prompt(12)));
    let names = hashes(&m, &prompt(12));
    let last = Event::Stored {
        hashes: vec![names[2]],
        parent: Some(names[1]),
        tokens: prompt(12)[8..].to_vec(),
        namespace: Arc::default(),
        switch: None,
    };
    drop(computed(&mut m, vec![7; 7])); // evicts the last block in both groups, and the second in one
    m.take_events();
    let _again = computed(&mut m, prompt(12));
    assert_eq!(m.stats().already_cached_blocks, 1);
    let mut events = m.take_events();
    events.retain(|event| matches!(event, Event::Stored { .. }));
    assert_eq!(events, [last]);
    m.check().expect("sound");
}

#[test]
fn a_content_that_comes_back_is_news_again() {
    let mut m = manager(4);
    used(&mut m, [1]);
    m.evict_all();
    m.take_events();
    used(&mut m, [1]);
    assert_eq!(m.take_events(), stored(&m, &block_of(1)));
    used(&mut m, [1]);
    assert_eq!(m.take_events(), []);
}

#[test]
fn only_what_was_missing_is_news() {
    let mut m = with(Config {
        eviction: Eviction::TwoQueue,
        ..settings(4)
    });
    lose_the_head(&mut m);
    let head = hashes(&m, &prompt(4));
    assert_eq!(removed(&m.take_events()), head);
    let _again = computed(&mut m, prompt(8));
    assert_eq!(m.take_events(), stored(&m, &prompt(4)));
    assert_eq!(m.stats().already_cached_blocks, 1);
}

/// A set of hashes as a reader has it, who looks for the parent of what is stored.
fn apply(held: &mut HashSet<u128>, events: &[Event]) {
    for event in events {
        match event {
            Event::Stored { hashes, parent, .. } => {
                assert!(
                    parent.is_none_or(|parent| held.contains(&parent)),
                    "{event:?}"
                );
                held.extend(hashes);
            }
            Event::Removed { hashes } => hashes.iter().for_each(|hash| {
                assert!(held.remove(hash));
            }),
            Event::Cleared { .. } => held.clear(),
            Event::Lost { .. } => {}
        }
    }
}

/// Stores and removes a block per round, until so many events are pending or lost.
fn unread(m: &mut BlockManager, rounds: u32) {
    for name in 0..rounds {
        used(m, [name]);
    }
}

#[test]
fn events_that_nobody_takes_are_lost_and_all_cached_blocks_are_stated() {
    let mut m = manager(4);
    let mut held = HashSet::new();
    unread(&mut m, 32_770); // 32,770 stored, 32,766 removed: 65,536
    let events = m.take_events();
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, Event::Lost { .. }))
    );
    apply(&mut held, &events);
    unread(&mut m, 100_000);
    assert_eq!(m.num_pending_events(), 5); // four blocks and a namespace
    let events = m.take_events();
    let num_events = match &events[..2] {
        [Event::Lost { num_events }, Event::Cleared { .. }] => *num_events,
        other => panic!("{other:?}"),
    };
    assert_eq!((num_events, events.len()), (200_000, 6));
    apply(&mut held, &events);
    assert_eq!(held, m.cached_hashes().into_iter().collect());
    unread(&mut m, 9);
    let events = m.take_events();
    assert!(matches!(
        events[0],
        Event::Stored { .. } | Event::Removed { .. }
    ));
    apply(&mut held, &events);
    assert_eq!(held, m.cached_hashes().into_iter().collect());
    m.check().expect("sound");
}

#[test]
fn what_is_stated_after_a_loss_has_parents_before_children_and_nothing_in_flight() {
    let mut m = manager(64);
    unread(&mut m, 40_000);
    // Three levels of nodes, two of them children of one block, and a namespace.
    let base = prompt(16);
    let mut handles = vec![computed(&mut m, base.clone())];
    for (len, name) in [(8, 7), (8, 8), (16, 9)] {
        let mut tokens = base[..len].to_vec();
        tokens.extend([name; 8]);
        handles.push(computed(&mut m, tokens.clone()));
        tokens.extend([name + 100; 8]);
        handles.push(computed(&mut m, tokens));
    }
    handles.push(m.sequence(prompt(8), b"tenant", true).expect("tokens"));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &handles[7]);
    let (mut held, events) = (HashSet::new(), m.take_events());
    assert!(matches!(events[0], Event::Lost { .. }));
    apply(&mut held, &events);
    assert_eq!(held, m.cached_hashes().into_iter().collect());
    commit(&mut m, plan.key());
    apply(&mut held, &m.take_events());
    assert_eq!(held, m.cached_hashes().into_iter().collect());
    handles.clear();
    m.evict_all();
    apply(&mut held, &m.take_events());
    assert_eq!((held.len(), m.cached_hashes().len()), (0, 0));
    m.check().expect("sound");
}

#[test]
fn a_pool_that_is_cleared_again_and_again_keeps_few_events() {
    let mut m = manager(4);
    for name in 0..70_000 {
        used(&mut m, [name]);
        m.evict_all();
    }
    let events = m.take_events();
    assert!(
        matches!(events[..], [Event::Lost { .. }, Event::Cleared { .. }]),
        "{events:?}"
    );
    assert_eq!(m.take_events(), []);
}
