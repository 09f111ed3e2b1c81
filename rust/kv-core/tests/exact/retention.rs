//! Priorities: what they order, when they end, what they leave behind.

use std::time::Duration;

use kv_core::{BlockManager, Error, Priority};

use super::tools::{block_of, computed, given_up, manager, prompt, removed, used};

const ALL: [u32; 4] = [1, 2, 3, 4];

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Contents 1 to 4, idle in this order.
fn four() -> BlockManager {
    let mut m = manager(4);
    used(&mut m, ALL);
    m
}

fn retain(m: &mut BlockManager, name: u32, priority: Priority, ttl: Option<u64>) {
    let covered = m.retain(&block_of(name), b"", priority, ttl.map(seconds));
    assert_eq!(covered, Ok(4));
}

#[test]
fn low_goes_first_and_high_goes_last() {
    let mut m = four();
    retain(&mut m, 1, Priority::High, None);
    retain(&mut m, 4, Priority::Low, None);
    retain(&mut m, 3, Priority::Low, None);
    assert_eq!(given_up(&mut m, 4, &ALL), [4, 3, 2, 1]);
}

#[test]
fn retaining_is_a_use() {
    let mut m = four();
    retain(&mut m, 1, Priority::Normal, None);
    assert_eq!(given_up(&mut m, 4, &ALL), [2, 3, 4, 1]);
}

#[test]
fn it_covers_whole_blocks_of_what_is_cached() {
    let mut m = manager(4);
    drop(computed(&mut m, prompt(10)));
    let mut covers = |tokens: &[u32], namespace: &[u8]| {
        m.retain(tokens, namespace, Priority::High, None)
            .expect("short")
    };
    assert_eq!(covers(&prompt(10), b""), 8);
    assert_eq!(covers(&prompt(7), b""), 4);
    assert_eq!(covers(&prompt(3), b""), 0);
    assert_eq!(covers(&prompt(10), b"other"), 0);
}

/// Content 1 is used least recently; whether it is kept nevertheless.
fn is_kept(m: &mut BlockManager) -> bool {
    used(m, [2, 3, 4]);
    match given_up(m, 4, &ALL)[..] {
        [1, 2, 3, 4] => false,
        [2, 3, 4, 1] => true,
        ref order => panic!("{order:?}"),
    }
}

#[test]
fn a_priority_ends_when_its_time_has_come_and_not_before() {
    for (now, kept) in [(10, true), (14, true), (15, false), (16, false)] {
        let mut m = four();
        m.tick(seconds(10));
        retain(&mut m, 1, Priority::High, Some(5));
        m.tick(seconds(now));
        assert_eq!(is_kept(&mut m), kept, "at {now}");
    }
}

#[test]
fn time_does_not_go_back() {
    for (now, kept) in [(14, true), (15, false)] {
        let mut m = four();
        m.tick(seconds(10));
        m.tick(seconds(3));
        retain(&mut m, 1, Priority::High, Some(5));
        m.tick(seconds(now));
        assert_eq!(is_kept(&mut m), kept, "at {now}");
    }
}

#[test]
fn the_later_word_wins() {
    let mut m = four();
    retain(&mut m, 1, Priority::High, Some(5));
    retain(&mut m, 1, Priority::High, None);
    m.tick(seconds(5));
    assert!(is_kept(&mut m), "for good");
    let mut m = four();
    retain(&mut m, 1, Priority::High, Some(5));
    retain(&mut m, 1, Priority::High, Some(10));
    m.tick(seconds(5));
    assert!(is_kept(&mut m), "for longer");
    let mut m = four();
    retain(&mut m, 1, Priority::High, Some(10));
    retain(&mut m, 1, Priority::High, Some(5));
    m.tick(seconds(5));
    assert!(!is_kept(&mut m), "no longer");
    let mut m = four();
    retain(&mut m, 1, Priority::High, None);
    retain(&mut m, 1, Priority::Normal, None);
    assert!(!is_kept(&mut m), "taken back");
}

#[test]
fn priorities_end_one_by_one() {
    let mut m = four();
    for (name, ttl) in [(3, 30), (1, 10), (2, 20)] {
        retain(&mut m, name, Priority::High, Some(ttl));
    }
    m.tick(seconds(20));
    // 1, then 2 became normal, after 4, which was so all the time.
    assert_eq!(given_up(&mut m, 4, &ALL), [4, 1, 2, 3]);
}

#[test]
fn it_wants_time_while_a_deadline_is_ahead() {
    let mut m = four();
    assert!(!m.wants_time());
    retain(&mut m, 1, Priority::High, None);
    assert!(!m.wants_time(), "for good");
    retain(&mut m, 1, Priority::High, Some(5));
    assert!(m.wants_time());
    m.tick(seconds(4));
    assert!(m.wants_time());
    m.tick(seconds(5));
    assert!(!m.wants_time());
}

#[test]
fn a_priority_ends_with_its_content() {
    let mut m = four();
    retain(&mut m, 1, Priority::High, None);
    assert_eq!(m.evict_idle(), 4);
    used(&mut m, ALL);
    assert!(!is_kept(&mut m));
}

/// The block that it is computed into may be that of its last continuation.
#[test]
fn a_priority_outlives_the_eviction_that_its_own_content_needs() {
    let mut m = manager(3);
    drop(computed(&mut m, prompt(8)));
    let covered = m.retain(&prompt(4), b"", Priority::Low, None);
    assert_eq!(covered, Ok(4));
    let taker = computed(&mut m, [block_of(1), vec![1]].concat());
    assert_eq!(
        m.contents().len(),
        2,
        "the second block of the prompt is left"
    );
    let again = computed(&mut m, prompt(4));
    assert_eq!(m.contents().len(), 2, "and has made way for the first");
    // Idle now: content 1, then the prompt's, which is low; another block is free.
    drop(taker);
    m.settle();
    drop(again);
    m.take_events();
    let _two = computed(&mut m, vec![7; 5]);
    let head = m.hasher().child(m.hasher().root(b""), &prompt(4));
    assert_eq!(removed(&m.take_events()), [head]);
}

/// The deadline of a content that is gone says nothing about the one that has its place now.
#[test]
fn a_dead_contents_deadline_passes_by() {
    let mut m = manager(4);
    used(&mut m, [9]);
    retain(&mut m, 9, Priority::Low, Some(5));
    assert_eq!(m.evict_idle(), 1);
    used(&mut m, ALL); // the first of these has its place
    for name in [2, 3, 4, 1] {
        retain(&mut m, name, Priority::High, None);
    }
    m.tick(seconds(5));
    assert!(!m.wants_time());
    assert_eq!(given_up(&mut m, 4, &ALL), [2, 3, 4, 1]);
    m.check().expect("sound");
}

#[test]
fn a_held_content_waits_in_the_list_of_its_priority_afterwards() {
    let mut m = manager(4);
    let held = computed(&mut m, block_of(1));
    retain(&mut m, 1, Priority::High, None);
    drop(held);
    used(&mut m, [2, 3, 4]);
    assert!(is_kept(&mut m));
    // It stays where it is while it is held.
    let mut m = manager(4);
    let held = computed(&mut m, block_of(1));
    retain(&mut m, 1, Priority::Low, None);
    used(&mut m, [2, 3, 4]);
    assert_eq!(given_up(&mut m, 3, &ALL), [2, 3, 4]);
    drop(held);
}

#[test]
fn priorities_have_names() {
    for (name, priority) in Priority::NAMES {
        assert_eq!(name.parse(), Ok(priority));
    }
    assert!(Priority::Low < Priority::Normal && Priority::Normal < Priority::High);
    let unknown = Error::UnknownPriority("urgent".into());
    assert_eq!("urgent".parse::<Priority>(), Err(unknown));
}
