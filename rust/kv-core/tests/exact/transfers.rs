//! Transfers: what is reserved, who waits, what is cached at the end, and what is held until then.

use std::time::{Duration, Instant};

use kv_core::{
    BlockId, BlockManager, BlockState, Config, Error, Evicted, Extend, LoadingBlock, Prefill,
    Reserve, SeqHandle, Transfer,
};

use super::tools::{
    PLENTY, assert_linear, begin, block_of, commit, computed, decoded, manager, prefill, prompt,
    removed, sequence, settings, table, used, with,
};

fn reserved(m: &mut BlockManager, seq: &SeqHandle, tokens: usize) -> Transfer {
    match m.reserve(seq.key(), tokens).expect("at rest") {
        Reserve::Reserved(transfer) => transfer,
        answer => panic!("{answer:?}"),
    }
}

fn blocks(transfer: &Transfer) -> Vec<u32> {
    let blocks = transfer.blocks().iter();
    blocks.map(|loading| loading.block.get()).collect()
}

fn tried(m: &mut BlockManager, seq: &SeqHandle) -> Prefill {
    let plan = begin(m, PLENTY);
    let answer = m.prefill(plan.key(), seq.key(), PLENTY, None);
    m.rollback(plan.key()).expect("the newest");
    m.check().expect("sound");
    answer.expect("no misuse")
}

fn planned(cached_tokens: usize, tokens: usize) -> Prefill {
    Prefill::Planned {
        cached_tokens,
        tokens,
        samples: true,
    }
}

/// Free, evictable, active, pinned, loading.
fn usage(m: &mut BlockManager) -> [usize; 5] {
    m.check().expect("sound");
    let usage = m.usage();
    assert_eq!(usage.num_blocks(), m.config().num_blocks);
    [
        usage.free,
        usage.evictable,
        usage.active,
        usage.pinned,
        usage.loading,
    ]
}

/// Two blocks of ten tokens are restored, the rest is computed.
#[test]
fn the_life_of_a_transfer() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(10));
    let transfer = reserved(&mut m, &seq, 10);
    assert_eq!((transfer.indices(), blocks(&transfer)), (0..2, vec![0, 1]));
    assert_eq!(usage(&mut m), [6, 0, 0, 0, 2]);
    assert_eq!((m.refs(0), m.seq_refs(0)), (Ok(1), Ok(0)));
    assert_eq!(m.state(0), Ok(BlockState::Loading));
    assert_eq!(m.snapshot().states[..3], [4, 4, 0]);
    assert_eq!((m.take_events(), m.cached_hashes()), (vec![], vec![]));
    assert_eq!(table(&m, &seq, 0), []);

    let serial = transfer.key().serial();
    assert_eq!(tried(&mut m, &seq), Prefill::Loading { transfer: serial });

    assert_eq!(m.complete(transfer.key(), 2), Ok(8));
    assert_eq!(usage(&mut m), [6, 0, 2, 0, 0]);
    assert_eq!(table(&m, &seq, 0), [Some(0), Some(1)]);
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_restored_tokens), (0, 8));
    assert_eq!(view.num_computed_tokens, 8);
    assert_eq!((m.take_events().len(), m.cached_hashes().len()), (1, 2));
    assert_eq!(tried(&mut m, &seq), planned(0, 2));

    // Another one finds them in the cache.
    let other = sequence(&mut m, prompt(10));
    assert_eq!(tried(&mut m, &other), planned(8, 2));
    let stats = m.stats();
    assert_eq!((stats.reserved_blocks, stats.restored_blocks), (2, 2));
    assert_eq!((stats.restored_tokens, stats.cached_tokens), (8, 0));
    assert_eq!((stats.prompt_tokens, stats.computed_tokens), (8, 0));
    assert_eq!((stats.registered_blocks, stats.hit_blocks), (2, 0));
    assert_eq!(stats.failed_transfers, 0);
}

#[test]
fn a_part_of_it_arrives() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(16));
    let transfer = reserved(&mut m, &seq, 15); // whole blocks only
    assert_eq!(transfer.indices(), 0..3);
    assert_eq!(m.complete(transfer.key(), 2), Ok(8));
    assert_eq!(usage(&mut m), [6, 0, 2, 0, 0]);
    assert_eq!(tried(&mut m, &seq), planned(0, 8));
    // The next one goes on from there.
    let next = reserved(&mut m, &seq, PLENTY);
    assert_eq!(next.indices(), 2..4);
    assert_eq!(usage(&mut m), [4, 0, 2, 0, 2]);
    assert_eq!(m.complete(next.key(), 2), Ok(7)); // the last token is computed
    let stats = m.stats();
    assert_eq!((stats.reserved_blocks, stats.restored_blocks), (5, 4));
    assert_eq!(stats.restored_tokens, 15);
}

/// Failed, failed by dropping its handle, or with nothing complete: as if it had not been.
#[test]
fn a_failed_transfer_is_counted_and_not_seen() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(10));
    for end in 0..3 {
        let transfer = reserved(&mut m, &seq, 10);
        match end {
            0 => assert_eq!(m.fail(transfer.key()), Ok(())),
            1 => drop(transfer),
            _ => assert_eq!(m.complete(transfer.key(), 0), Ok(0)),
        }
        assert_eq!(usage(&mut m), [8, 0, 0, 0, 0]);
        assert_eq!(tried(&mut m, &seq), planned(0, 10));
        assert_eq!(m.stats().failed_transfers, end + 1);
    }
    assert_eq!(m.take_events(), []);
    assert_eq!(m.stats().restored_blocks, 0);
}

#[test]
fn a_prefix_is_loaded_once() {
    let mut m = manager(16);
    let first = sequence(&mut m, prompt(10));
    let transfer = reserved(&mut m, &first, 10);
    let number = transfer.key().serial();
    // One that needs a part of it, one that needs more, one that needs other tokens.
    let short = sequence(&mut m, prompt(5));
    let long = sequence(&mut m, prompt(20));
    let other = sequence(&mut m, block_of(7));
    for seq in [&short, &long] {
        let answer = m.reserve(seq.key(), PLENTY);
        assert!(matches!(answer, Ok(Reserve::Loading { transfer }) if transfer == number));
        assert_eq!(tried(&mut m, seq), Prefill::Loading { transfer: number });
    }
    assert_eq!(tried(&mut m, &other), planned(0, 4));
    // Too short to reuse any, or not allowed to.
    let none = sequence(&mut m, prompt(3));
    let fresh = m.sequence(prompt(10), b"", false).expect("tokens");
    let tenant = m.sequence(prompt(10), b"tenant", true).expect("tokens");
    assert_eq!(tried(&mut m, &none), planned(0, 3));
    assert_eq!(tried(&mut m, &fresh), planned(0, 10));
    assert_eq!(tried(&mut m, &tenant), planned(0, 10));
    assert!(matches!(m.reserve(fresh.key(), 10), Ok(Reserve::NotNeeded)));
    // Neither a pin nor a call without a plan waits: they end before it.
    assert_eq!(
        m.match_prefix(&prompt(10), b"")
            .expect("short")
            .num_blocks(),
        0
    );
    assert_eq!(m.reuse_cached(short.key()), Ok(0));
    m.complete(transfer.key(), 2).expect("open");
    assert_eq!(tried(&mut m, &short), planned(4, 1));
    assert_eq!(tried(&mut m, &long), planned(8, 12));
    assert_eq!(reserved(&mut m, &long, 20).indices(), 2..5);
}

/// It goes on from the cached blocks, holds them, and ends before what an open step computes.
#[test]
fn a_transfer_follows_what_is_cached() {
    let mut m = manager(4);
    used(&mut m, [1]);
    let seq = sequence(&mut m, [1, 1, 1, 1, 2, 2, 2, 2, 3].to_vec());
    let transfer = reserved(&mut m, &seq, 9);
    assert_eq!((transfer.indices(), blocks(&transfer)), (1..2, vec![1]));
    assert_eq!(usage(&mut m), [2, 0, 0, 1, 1]);
    // The cached block is not evicted meanwhile.
    let large = sequence(&mut m, vec![5; 12]);
    let answer = tried(&mut m, &large);
    assert_eq!(
        answer,
        Prefill::NoRoom {
            needed: 3,
            available: 2
        }
    );
    assert_eq!(m.evict_all(), 0);
    assert_eq!(m.complete(transfer.key(), 1), Ok(8));
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_restored_tokens), (4, 4));
    assert_eq!((m.stats().hit_blocks, m.stats().cached_tokens), (1, 4));
    assert_eq!(usage(&mut m), [2, 0, 2, 0, 0]);
    let cached = sequence(&mut m, [1, 1, 1, 1, 2, 2, 2, 2].to_vec());
    assert!(matches!(m.reserve(cached.key(), 8), Ok(Reserve::NotNeeded)));
}

#[test]
fn what_a_step_computes_is_not_loaded() {
    let mut m = manager(8);
    let first = sequence(&mut m, prompt(8));
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &first);
    let second = sequence(&mut m, prompt(12));
    assert!(matches!(
        m.reserve(second.key(), 12),
        Ok(Reserve::NotNeeded)
    ));
    let sequence = first.id();
    let answer = m.reserve(first.key(), 8);
    assert_eq!(answer.expect_err("planned"), Error::InPlan { sequence });
    commit(&mut m, plan.key());
    assert_eq!(reserved(&mut m, &second, 12).indices(), 2..3);
}

/// Whole or not at all.
#[test]
fn no_room_changes_nothing() {
    let mut m = manager(4);
    used(&mut m, [1]);
    let before = m.queued();
    let seq = sequence(&mut m, [vec![1; 4], prompt(16)].concat());
    let answer = m.reserve(seq.key(), 20).expect("at rest");
    // Four blocks, and the cached one that it would hold.
    let no_room = matches!(
        answer,
        Reserve::NoRoom {
            needed: 5,
            available: 4
        }
    );
    assert!(no_room, "{answer:?}");
    assert_eq!((m.queued(), usage(&mut m)), (before, [3, 1, 0, 0, 0]));
    let transfer = reserved(&mut m, &seq, 16);
    assert_eq!(usage(&mut m), [0, 0, 0, 1, 3]);
    drop(transfer);
    assert_eq!(usage(&mut m), [3, 1, 0, 0, 0]);
}

/// An abort neither ends a transfer nor frees a block that it fills; what arrives is cached for the next one.
#[test]
fn the_sequence_goes_and_the_transfer_stays() {
    let mut m = manager(3);
    let seq = sequence(&mut m, prompt(10));
    let transfer = reserved(&mut m, &seq, 10);
    m.free(seq.key()).expect("live");
    drop(seq);
    assert_eq!(usage(&mut m), [1, 0, 0, 0, 2]);
    let other = sequence(&mut m, block_of(5));
    let Ok(Extend::Extended { blocks, .. }) = m.extend(other.key(), 4) else {
        panic!("a block is free");
    };
    assert_eq!(blocks[0].get(), 2);
    assert_eq!(m.complete(transfer.key(), 2), Ok(0));
    assert_eq!(usage(&mut m), [0, 2, 1, 0, 0]);
    let again = sequence(&mut m, prompt(9));
    assert_eq!(m.reuse_cached(again.key()), Ok(8));
    assert_eq!(
        (m.stats().restored_blocks, m.stats().restored_tokens),
        (2, 0)
    );
}

/// Blocks may be filled in any order: an index counts if it is filled in every layer group.
#[test]
fn filled_indices_are_those_that_every_group_has() {
    let config = Config {
        groups: vec![None, None],
        ..Config::new(16, 4)
    };
    let mut m = BlockManager::new(config).expect("valid");
    let seq = sequence(&mut m, prompt(13));
    let transfer = reserved(&mut m, &seq, 12);
    let all = transfer.blocks().to_vec();
    assert_eq!(all.len(), 6);
    for count in 0..=6 {
        let mut some = all[..count].to_vec();
        some.reverse();
        assert_eq!(transfer.filled_indices(&some), Ok(count / 2));
    }
    let gap: Vec<_> = all
        .iter()
        .copied()
        .filter(|b| (b.index, b.group) != (1, 0))
        .collect();
    assert_eq!(transfer.filled_indices(&gap), Ok(1));
    let other = LoadingBlock {
        block: BlockId::from(15),
        ..all[0]
    };
    assert_eq!(transfer.filled_indices(&[all[1], other]), Err(other));
}

/// Changes of a sequence meanwhile: it is reset, forked, or appended to.
#[test]
fn the_sequence_may_change_meanwhile() {
    let mut m = manager(8);
    drop(computed(&mut m, prompt(4)));
    let seq = sequence(&mut m, prompt(12));
    m.append(seq.key(), &[12, 13, 14, 15]).expect("at rest");
    let transfer = reserved(&mut m, &seq, 16);
    assert_eq!(transfer.indices(), 1..4);
    assert_eq!(m.reuse_cached(seq.key()), Ok(4));
    m.reset(seq.key()).expect("at rest");
    let fork = m.fork(seq.key(), 16).expect("at rest");
    assert_eq!(m.complete(transfer.key(), 3), Ok(15));
    let view = m.view(seq.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_restored_tokens), (4, 11));
    assert_eq!(m.reuse_cached(fork.key()), Ok(15));
    let copy = m.fork(seq.key(), 12).expect("at rest");
    let view = m.view(copy.key()).expect("live");
    assert_eq!((view.num_cached_tokens, view.num_restored_tokens), (4, 8));
    m.reset(seq.key()).expect("at rest");
    assert_eq!(m.view(seq.key()).expect("live").num_restored_tokens, 0);
}

/// A step that reads restored blocks is rolled back; they stay cached, as blocks that an earlier step computed.
#[test]
fn a_rollback_undoes_the_step_and_not_the_transfer() {
    let mut m = manager(8);
    let seq = sequence(&mut m, prompt(10));
    let waiting = sequence(&mut m, prompt(10));
    let transfer = reserved(&mut m, &seq, 10);
    let older = begin(&mut m, PLENTY);
    let alone = sequence(&mut m, block_of(3));
    prefill(&mut m, older.key(), &alone);
    // It ends while a step is open.
    assert_eq!(m.complete(transfer.key(), 2), Ok(8));
    let newer = begin(&mut m, 2);
    let answer = m.prefill(newer.key(), seq.key(), PLENTY, None);
    assert_eq!(answer, Ok(planned(0, 2))); // the budget pays for two tokens
    m.rollback(newer.key()).expect("the newest");
    assert_eq!(m.view(seq.key()).expect("live").num_computed_tokens, 8);
    let newer = begin(&mut m, 2);
    let answer = m.prefill(newer.key(), waiting.key(), PLENTY, None);
    assert_eq!(answer, Ok(planned(8, 2)));
    commit(&mut m, older.key());
    commit(&mut m, newer.key());
    assert_eq!(usage(&mut m), [4, 0, 4, 0, 0]);
}

/// A sequence that computes the same blocks registers them once the transfer has ended.
#[test]
fn computed_blocks_wait_to_be_merged() {
    for arrived in [2, 0] {
        let mut m = manager(16);
        let fresh = m.sequence(prompt(9), b"", false).expect("tokens");
        let seq = sequence(&mut m, prompt(9));
        let transfer = reserved(&mut m, &seq, 8);
        let plan = begin(&mut m, PLENTY);
        prefill(&mut m, plan.key(), &fresh);
        assert_eq!(commit(&mut m, plan.key()), []);
        assert_eq!(usage(&mut m), [11, 0, 3, 0, 2]);
        assert_eq!(m.view(fresh.key()).expect("live").num_registered_blocks, 0);
        m.complete(transfer.key(), arrived).expect("open");
        let merged = decoded(&mut m, &[&fresh]);
        assert_eq!(merged.len(), arrived);
        assert_eq!(m.view(fresh.key()).expect("live").num_registered_blocks, 2);
        let active = 3;
        assert_eq!(usage(&mut m), [16 - active, 0, active, 0, 0]);
    }
}

/// The blocks before those that it fills are not evicted, also where its sequence has computed them.
#[test]
fn a_transfer_holds_its_whole_prefix() {
    let mut m = manager(8);
    let seq = computed(&mut m, prompt(4));
    drop(seq);
    let seq = sequence(&mut m, prompt(9));
    assert_eq!(m.reuse_cached(seq.key()), Ok(4));
    let transfer = reserved(&mut m, &seq, 8);
    drop(seq);
    assert_eq!((m.evict_all(), usage(&mut m)), (0, [6, 0, 0, 1, 1]));
    let other = sequence(&mut m, prompt(9));
    assert_eq!(tried(&mut m, &other), Prefill::Loading { transfer: 1 });
    m.abandon(transfer.key()).expect("open");
    assert_eq!((m.evict_all(), usage(&mut m)), (1, [7, 0, 0, 0, 1]));
    assert_eq!(tried(&mut m, &other), planned(0, 9));
}

/// For a disk that does not answer: no prefill waits any more, and its blocks are not free before it ends.
#[test]
fn an_abandoned_transfer_holds_its_blocks() {
    let mut m = manager(4);
    let seq = sequence(&mut m, prompt(10));
    let transfer = reserved(&mut m, &seq, 10);
    assert_eq!(m.abandon(transfer.key()), Ok(()));
    assert_eq!(m.abandon(transfer.key()), Ok(()));
    assert_eq!(usage(&mut m), [2, 0, 0, 0, 2]);
    let no_room = Prefill::NoRoom {
        needed: 3,
        available: 2,
    };
    assert_eq!(tried(&mut m, &seq), no_room);
    assert_eq!(m.complete(transfer.key(), 2), Ok(0));
    assert_eq!(usage(&mut m), [4, 0, 0, 0, 0]);
    assert_eq!(
        (m.stats().failed_transfers, m.stats().restored_blocks),
        (1, 0)
    );
    assert_eq!(tried(&mut m, &seq), planned(0, 10));
}

/// Two at once, ended in the other order. The second one restores nothing before the first one has.
#[test]
fn transfers_end_in_any_order() {
    let mut m = manager(16);
    let (one, two) = (sequence(&mut m, prompt(8)), sequence(&mut m, vec![9; 8]));
    let first = reserved(&mut m, &one, 8);
    let second = reserved(&mut m, &two, 8);
    assert_eq!((blocks(&first), blocks(&second)), (vec![0, 1], vec![2, 3]));
    assert_eq!(m.complete(second.key(), 2), Ok(7));
    assert_eq!(tried(&mut m, &one), Prefill::Loading { transfer: 1 });
    assert_eq!(m.complete(first.key(), 2), Ok(7));
    assert_eq!(usage(&mut m), [12, 0, 4, 0, 0]);
}

/// A window needs its last blocks only, and blocks that a layer group has kept are not loaded again.
#[test]
fn a_group_is_given_what_its_window_needs() {
    let mut m = with(Config {
        groups: vec![None, Some(4)],
        ..settings(16)
    });
    let seq = sequence(&mut m, prompt(16));
    let transfer = reserved(&mut m, &seq, 16);
    let indices = transfer.blocks().iter().map(|at| (at.index, at.group));
    let expected = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)];
    assert_eq!(indices.collect::<Vec<_>>(), expected);
    assert_eq!(m.complete(transfer.key(), 4), Ok(15));
    assert_eq!(table(&m, &seq, 1)[..3], [None, None, None]);
    assert_eq!(m.stats().restored_blocks, 5);
    drop(seq);
    // A shorter prompt lacks the block of its window alone.
    let short = sequence(&mut m, prompt(9));
    assert_eq!(tried(&mut m, &short), planned(0, 9));
    let transfer = reserved(&mut m, &short, 8);
    let indices = transfer.blocks().iter().map(|at| (at.index, at.group));
    assert_eq!(indices.collect::<Vec<_>>(), [(1, 1)]);
    assert_eq!(usage(&mut m), [10, 3, 0, 2, 1]);
    assert_eq!(tried(&mut m, &short), Prefill::Loading { transfer: 2 });
    m.take_events();
    assert_eq!(m.complete(transfer.key(), 2), Ok(8));
    assert_eq!(m.take_events(), []); // it was stored before
    assert_eq!(usage(&mut m), [10, 3, 3, 0, 0]);
}

#[test]
fn misuse_changes_nothing() {
    let (mut m, mut other) = (manager(4), manager(4));
    let seq = sequence(&mut m, prompt(8));
    let transfer = reserved(&mut m, &seq, 8);
    let key = transfer.key();
    let too_many = Error::TransferBlocks {
        transfer: 1,
        reserved: 2,
        num_blocks: 3,
    };
    assert_eq!(m.complete(key, 3), Err(too_many));
    let elsewhere = Error::WrongManager {
        what: "transfer",
        id: 1,
    };
    assert_eq!(other.complete(key, 1), Err(elsewhere));
    assert_eq!(usage(&mut m), [2, 0, 0, 0, 2]);
    assert_eq!(m.complete(key, 1), Ok(4));
    let ended = Error::TransferEnded { transfer: 1 };
    assert_eq!(m.fail(key), Err(ended.clone()));
    assert_eq!(m.abandon(key), Err(ended.clone()));
    assert_eq!(ended.to_string(), "transfer 1 has ended already");
    drop(transfer); // nothing is left to fail
    assert_eq!(m.stats().failed_transfers, 0);
}

/// Opens so many transfers of a block each, and drops them, the newest first. Returns how long the drop takes.
fn dropped(count: u32) -> Duration {
    let mut m = manager(count as usize);
    let mut open = Vec::new();
    for name in 0..count {
        let seq = sequence(&mut m, [block_of(name), block_of(name)].concat());
        open.push(reserved(&mut m, &seq, 4));
    }
    m.drain_deferred();
    open.into_iter().rev().for_each(drop);
    assert_eq!(m.num_deferred(), count as usize);
    let start = Instant::now();
    m.drain_deferred();
    let took = start.elapsed();
    assert_eq!((m.usage().free, m.num_deferred()), (count as usize, 0));
    took
}

#[test]
fn many_transfers_end_in_linear_time() {
    assert_linear(dropped, 500);
}

/// Blocks know 32 bits of the number of their transfer.
#[test]
fn a_transfer_is_named_by_whoever_waits_for_it() {
    let mut m = manager(64);
    let open: Vec<_> = (0..20)
        .map(|name| {
            let seq = sequence(&mut m, [block_of(name), block_of(name)].concat());
            (reserved(&mut m, &seq, 4), seq)
        })
        .collect();
    for (transfer, seq) in &open {
        let waits = tried(&mut m, seq);
        let transfer = transfer.key().serial();
        assert_eq!(waits, Prefill::Loading { transfer });
    }
}

/// Allocations tell what they evict, while its KV is whole; other evictions do not.
#[test]
fn evicted_blocks_are_kept_for_a_store() {
    let mut m = with(Config {
        keep_evicted: true,
        ..settings(3)
    });
    drop(computed(&mut m, prompt(8)));
    let taker = sequence(&mut m, vec![7; 12]);
    let plan = begin(&mut m, PLENTY);
    prefill(&mut m, plan.key(), &taker);
    let root = m.hasher().root(b"");
    let first = m.hasher().child(root, &[0, 1, 2, 3]);
    let second = m.hasher().child(first, &[4, 5, 6, 7]);
    let held = |block: u32, hash, parent, tokens: &[u32]| Evicted {
        block: block.into(),
        group: 0,
        hash,
        parent,
        tokens: tokens.to_vec(),
        namespace: (*b"").into(),
        switch: None,
    };
    let expected = [
        held(1, second, Some(first), &[4, 5, 6, 7]),
        held(0, first, None, &[0, 1, 2, 3]),
    ];
    assert_eq!(m.take_evicted(), expected);
    assert_eq!(m.take_evicted(), []);
    commit(&mut m, plan.key());
    drop(taker);
    assert_eq!(m.evict_all(), 3);
    assert_eq!(m.take_evicted(), []);
}

/// Records of blocks that were written again since are of no use.
#[test]
fn of_evicted_blocks_that_nobody_takes_the_latest_are_kept() {
    let mut m = with(Config {
        keep_evicted: true,
        ..settings(3)
    });
    for name in 0..100 {
        drop(computed(&mut m, block_of(name)));
    }
    let evicted = m.take_evicted();
    assert!((3..=6).contains(&evicted.len()), "{}", evicted.len());
    let names: Vec<u32> = evicted.iter().map(|record| record.tokens[0]).collect();
    let latest: Vec<u32> = (97 - names.len() as u32..97).collect();
    assert_eq!(names, latest);
    assert_eq!(m.take_evicted(), []);
}

#[test]
fn nothing_is_kept_unless_asked() {
    let mut m = manager(3);
    drop(computed(&mut m, prompt(12)));
    drop(computed(&mut m, vec![7; 12]));
    assert_eq!((m.take_evicted(), m.stats().evicted_blocks), (vec![], 3));
}

/// Blocks are evicted ahead of need, and stay as they are until the pin goes.
#[test]
fn blocks_are_evicted_ahead() {
    let mut m = manager(4);
    used(&mut m, [1, 2, 3]);
    m.take_events();
    let (evicted, pin) = m.evict(2);
    let tokens: Vec<_> = evicted.iter().map(|evicted| evicted.tokens[0]).collect();
    assert_eq!(tokens, [1, 2]);
    let held: Vec<u32> = pin.blocks().map(|block| block.get()).collect();
    assert_eq!((held, pin.num_tokens()), (vec![0, 1], 0));
    assert_eq!(usage(&mut m), [1, 1, 0, 2, 0]);
    assert_eq!(removed(&m.take_events()).len(), 2);
    let seq = sequence(&mut m, block_of(1));
    assert_eq!(tried(&mut m, &seq), planned(0, 4));
    m.attach(seq.key(), &pin).expect("it is empty");
    assert_eq!(table(&m, &seq, 0), []);
    drop(pin);
    assert_eq!(usage(&mut m), [3, 1, 0, 0, 0]);
    // No more than there are.
    let (evicted, pin) = m.evict(9);
    assert_eq!((evicted.len(), pin.num_blocks()), (1, 1));
    assert_eq!(usage(&mut m), [3, 0, 0, 1, 0]);
}
