//! The order of eviction, block by block.

use kv_core::{BlockManager, Config, Error, Eviction};

use super::tools::{given_up, manager, settings, used, with};

fn two_queues(num_blocks: usize) -> BlockManager {
    with(Config {
        eviction: Eviction::TwoQueue,
        ..settings(num_blocks)
    })
}

#[test]
fn lru_gives_up_what_was_not_used_for_longest() {
    let mut m = manager(4);
    used(&mut m, [1, 2, 3, 4, 2, 1]);
    assert_eq!(given_up(&mut m, 4, &[1, 2, 3, 4]), [3, 4, 2, 1]);
}

#[test]
fn free_blocks_go_before_evictable_ones() {
    let mut m = manager(5);
    used(&mut m, [1, 2, 3]);
    assert_eq!(given_up(&mut m, 2, &[]), []);
    assert_eq!(given_up(&mut m, 3, &[1, 2, 3]), [1]);
}

#[test]
fn two_queues_keep_those_used_once_to_half_of_the_evictable_blocks() {
    let all = [1, 2, 3, 4, 5];
    let mut m = two_queues(5);
    used(&mut m, all);
    used(&mut m, [1, 2]);
    // Used once 3, 4, 5; used again 1, 2: the larger list gives, of equal ones that of the used again.
    assert_eq!(given_up(&mut m, 5, &all), [3, 1, 4, 2, 5]);
}

#[test]
fn two_queues_with_one_list_empty() {
    let mut m = two_queues(3);
    used(&mut m, [1, 2, 3]);
    assert_eq!(given_up(&mut m, 3, &[1, 2, 3]), [1, 2, 3]);
    let mut m = two_queues(3);
    used(&mut m, [1, 2, 3, 3, 1, 2]);
    assert_eq!(given_up(&mut m, 3, &[1, 2, 3]), [3, 1, 2]);
    // Fewer were used once than again.
    let mut m = two_queues(3);
    used(&mut m, [1, 2, 3, 1, 2]);
    assert_eq!(given_up(&mut m, 3, &[1, 2, 3]), [1, 2, 3]);
}

#[test]
fn a_content_that_comes_back_soon_counts_as_used_again() {
    let mut m = two_queues(3);
    used(&mut m, [1, 2, 3]);
    used(&mut m, [4, 1]); // 4 pushes 1 out, which comes back and pushes 2 out
    assert_eq!(given_up(&mut m, 3, &[1, 3, 4]), [3, 1, 4]);
    let mut m = manager(3);
    used(&mut m, [1, 2, 3, 4, 1]);
    assert_eq!(given_up(&mut m, 3, &[1, 3, 4]), [3, 4, 1]);
}

/// As many are remembered as the pool has blocks; the last of them is the one that makes way.
#[test]
fn a_content_that_comes_back_late_is_new() {
    let mut m = two_queues(3);
    used(&mut m, 1..=5); // 1 and 2 were evicted
    used(&mut m, [1]); // and now 3
    assert_eq!(given_up(&mut m, 3, &[1, 4, 5]), [4, 1, 5]);
    let mut m = two_queues(3);
    used(&mut m, 1..=6); // 1, 2 and 3 were evicted
    used(&mut m, [1]); // and now 4: 1 is forgotten
    assert_eq!(given_up(&mut m, 3, &[1, 5, 6]), [5, 6, 1]);
}

#[test]
fn a_pin_is_a_use() {
    let mut m = two_queues(3);
    used(&mut m, [1, 2, 3]);
    drop(m.match_prefix(&[1; 4], b"").expect("short"));
    assert_eq!(given_up(&mut m, 3, &[1, 2, 3]), [2, 1, 3]);
}

#[test]
fn policies_have_names() {
    assert_eq!(Eviction::Lru.name(), "lru");
    assert_eq!(Eviction::TwoQueue.name(), "2q");
    for (name, policy) in Eviction::NAMES {
        assert_eq!((name.parse(), policy.name()), (Ok(policy), name));
    }
    let unknown = Error::UnknownPolicy("mru".into());
    assert_eq!("mru".parse::<Eviction>(), Err(unknown));
}
