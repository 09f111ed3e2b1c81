//! Settings and arguments: the last value that is taken and the first that is refused.

use kv_core::{BlockManager, BlockState, Config, ContentHasher, Error};

use super::tools::{begin, computed, manager, prompt, sequence, settings, with};

/// The setting `name` must be `min` to `max`.
fn out_of_range(name: &'static str, min: usize, max: usize, given: usize) -> Option<Error> {
    Some(Error::OutOfRange {
        name,
        min,
        max,
        given,
    })
}

fn refused(config: Config) -> Option<Error> {
    BlockManager::new(config).err()
}

#[test]
fn block_sizes() {
    for block_size in [0, 65_537] {
        let config = Config::new(1, block_size);
        let error = out_of_range("block_size", 1, 65_536, block_size);
        assert_eq!(refused(config), error);
    }
    for block_size in [1, 65_536] {
        assert_eq!(refused(Config::new(1, block_size)), None);
    }
}

#[test]
fn pool_sizes() {
    for num_blocks in [0, (1 << 31) + 1] {
        let config = Config::new(num_blocks, 4);
        let error = out_of_range("num_blocks", 1, 1 << 31, num_blocks);
        assert_eq!(refused(config), error);
    }
    let mut one = with(Config::new(1, 4));
    assert_eq!(one.usage().free, 1);
    // As many as there may be: a matter of memory.
    let num_blocks = 1 << 31;
    let too_large = refused(Config::new(num_blocks, 65_536));
    assert_eq!(too_large, Some(Error::OutOfMemory { num_blocks }));
}

#[test]
fn hash_bits() {
    for (hash_bits, error) in [
        (0, None),
        (127, None),
        (128, None),
        (129, out_of_range("hash_bits", 0, 128, 129)),
        (130, out_of_range("hash_bits", 0, 128, 130)),
    ] {
        let config = Config {
            hash_bits,
            ..settings(1)
        };
        assert_eq!(refused(config), error);
    }
}

#[test]
fn layer_groups() {
    let number = |given| out_of_range("the number of layer groups", 1, 64, given);
    let window = Error::TooFew {
        name: "a layer group's window",
        min: 1,
        given: 0,
    };
    for (groups, error) in [
        (vec![], number(0)),
        (vec![None; 64], None),
        (vec![None; 65], number(65)),
        (vec![None, Some(0)], Some(window)),
        (vec![None, Some(1)], None),
    ] {
        let config = Config {
            groups,
            ..settings(1)
        };
        assert_eq!(refused(config), error);
    }
}

#[test]
fn namespaces() {
    let mut m = manager(1);
    let (longest, longer) = (vec![1; 65_536], vec![1; 65_537]);
    let error = Error::Namespace { bytes: 65_537 };
    assert!(m.sequence(vec![1], &longest, true).is_ok());
    assert!(m.match_prefix(&[1], &longest).is_ok());
    assert_eq!(
        m.sequence(vec![1], &longer, true).err(),
        Some(error.clone())
    );
    assert_eq!(m.match_prefix(&[1], &longer).err(), Some(error));
}

#[test]
fn block_ids() {
    let mut m = manager(3);
    let error = Error::UnknownBlock {
        block: 3,
        num_blocks: 3,
    };
    assert_eq!((m.refs(2), m.refs(3)), (Ok(0), Err(error.clone())));
    assert_eq!((m.seq_refs(2), m.seq_refs(3)), (Ok(0), Err(error.clone())));
    assert_eq!((m.state(2), m.state(3)), (Ok(BlockState::Free), Err(error)));
}

#[test]
fn two_steps_may_be_open() {
    let mut m = manager(3);
    let plans = [begin(&mut m, 1), begin(&mut m, 1)];
    assert_eq!(plans.each_ref().map(|plan| plan.key().serial()), [1, 2]);
    let error = Error::PlanOpen { plan: 1 };
    assert_eq!(m.begin_step(1).err(), Some(error));
    m.commit(plans[0].key(), &[]).expect("the oldest");
    assert_eq!(begin(&mut m, 1).key().serial(), 3);
}

#[test]
fn fork_lengths() {
    let mut m = manager(3);
    let seq = sequence(&mut m, prompt(5));
    for num_tokens in [0, 6] {
        let error = Error::ForkLength {
            num_tokens,
            sequence_tokens: 5,
        };
        assert_eq!(m.fork(seq.key(), num_tokens).err(), Some(error));
    }
    for num_tokens in [1, 5] {
        let fork = m.fork(seq.key(), num_tokens).expect("within");
        let tokens = m.view(fork.key()).expect("live").tokens.len();
        assert_eq!(tokens, num_tokens);
    }
}

#[test]
fn trims() {
    let mut m = manager(4);
    let seq = computed(&mut m, prompt(5));
    let plan = begin(&mut m, 1);
    assert_eq!(m.decode(plan.key(), &[seq.key()], 8), Ok(vec![]));
    m.commit(plan.key(), &[1]).expect("one row");
    let error = Error::TrimBelowComputed {
        num_tokens: 5,
        computed: 6,
    };
    assert_eq!(m.trim(seq.key(), 5), Err(error));
    assert_eq!(m.trim(seq.key(), 13), Ok(0));
    assert_eq!(m.trim(seq.key(), 12), Ok(1));
    assert_eq!(m.trim(seq.key(), 6), Ok(1));
}

#[test]
fn seeds_are_random_unless_given() {
    let seed = |config| with(config).hasher().seed();
    assert_eq!(seed(settings(1)), 1);
    let drawn = [(); 3].map(|()| seed(Config::new(1, 1)));
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2]);
    let drawn = [(); 3].map(|()| ContentHasher::random_seed());
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2]);
    let seeds = [3, 4].map(|seed| ContentHasher::new(seed, 128).root(b"x"));
    assert_ne!(seeds[0], seeds[1]);
}
